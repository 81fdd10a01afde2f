"""How fast a server is, as the product learns it while the server works."""

from collections.abc import Iterable

from benchmarks.fit.replay import Timing
from extproc.predict.calibration import Calibration
from extproc.predict.hardware import PROFILES
from extproc.predict.windows import EngineCounts

_START = PROFILES["llama-8b-a10"].step
"""What the server is thought to be before anything was seen of it; it is not."""


def learned(polls: Iterable[EngineCounts]) -> Timing:
    """From nothing but polled counters, and the profile of another card."""
    calibration = Calibration(_START)
    for poll in polls:
        calibration.poll(poll)
    return Timing(calibration.model)
