"""``extproc check``: what is missing or dangerous in a configuration, in Envoy, or in what runs."""
