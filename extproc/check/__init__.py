"""``extproc check``: what is missing or dangerous in a configuration, an Envoy file, or live."""
