"""Step-time model, output lengths and completion time."""
