"""A router for vLLM behind Envoy: each request goes to the replica predicted to finish it soonest."""

__version__ = "0.1.0"
