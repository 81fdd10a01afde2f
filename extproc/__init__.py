"""A router for vLLM behind Envoy: a request goes where it is predicted to finish soonest."""

__version__ = "0.1.0"
