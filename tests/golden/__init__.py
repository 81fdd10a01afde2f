"""Golden files: what a restructuring must leave as it is, recorded from running processes only."""
