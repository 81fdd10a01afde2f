"""Replays of traffic under a virtual clock, by the production router and the simulator's
engines."""
