"""Envoy: checks of its configuration and of what runs, and the server of its replicas (EDS)."""
