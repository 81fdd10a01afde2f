"""Time, passed in: production, tests and the discrete-event simulation run the same code."""

import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds that never run backwards; only differences mean something
monotonic: Clock = time.monotonic
wall: Clock = time.time  # seconds since the epoch, for stamps that leave the process
