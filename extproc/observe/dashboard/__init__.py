"""Live page on a router's admin address: its fleet, its decisions and its queue."""
