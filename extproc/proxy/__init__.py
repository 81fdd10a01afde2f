"""The gRPC stream to Envoy, and the life of a request in the router."""
