"""Clocks, which code takes as arguments, so that tests and simulations can replace them."""

import time
from collections.abc import Callable
from datetime import datetime

Clock = Callable[[], float]  # seconds
monotonic: Clock = time.monotonic  # never runs backwards; its zero has no meaning
wall: Clock = time.time  # seconds since the epoch, for timestamps that leave the process


def time_of_day(at: float) -> str:
    """Formats seconds since the epoch as local time: ``14:03:59``."""
    return f"{datetime.fromtimestamp(at):%H:%M:%S}"
