"""Redis: what is written, under which key, for how long."""
