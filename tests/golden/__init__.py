"""Golden files: outputs of running processes that a restructuring must not change."""
