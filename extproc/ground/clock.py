"""Clocks, passed in so that production, tests and simulation run the same code."""

import time
from collections.abc import Callable
from datetime import datetime

Clock = Callable[[], float]  # seconds; never runs backwards, its zero has no meaning
monotonic: Clock = time.monotonic
wall: Clock = time.time  # seconds since the epoch, for timestamps that leave the process


def time_of_day(at: float) -> str:
    """Returns a time (seconds since the epoch) as hours, minutes and seconds of local time."""
    return f"{datetime.fromtimestamp(at):%H:%M:%S}"
