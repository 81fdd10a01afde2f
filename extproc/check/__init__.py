"""``extproc check``: what is missing or dangerous in a configuration or an Envoy file."""
