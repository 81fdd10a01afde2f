"""Traffic played again under a virtual clock: the router against the simulator's engines."""
