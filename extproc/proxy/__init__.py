"""The gRPC stream: messages in, mutations out, lifetime of a request."""
