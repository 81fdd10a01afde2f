"""Envoy: checks of its file and of a running system, and the EDS server of its replicas."""
