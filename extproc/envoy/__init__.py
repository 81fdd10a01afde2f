"""Checks of Envoy files and of a running system; the EDS server, which tells Envoy the replicas."""
