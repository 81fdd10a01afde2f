"""A control plane for Envoy: the replicas of a pool, or all that Envoy runs with."""
