"""Clocks, passed in so that production, tests and simulation run the same code."""

import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds; never runs backwards, its zero has no meaning
monotonic: Clock = time.monotonic
wall: Clock = time.time  # seconds since the epoch, for timestamps that leave the process
