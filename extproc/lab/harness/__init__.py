"""Starts Envoy, Redis, replicas, pollers and routers for the demo, tests and benchmarks."""
