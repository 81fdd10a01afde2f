"""How late a process delivers the steps of its simulated engine."""

from bisect import bisect_left
from math import ceil
from typing import Any

from extproc.lab.simulator.histogram import Histogram

_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
)


class Lateness:
    """Delays behind the times at which steps were due.

    A simulated step ends on time only where its process gets CPU then. What is late here clients
    see late: figures from a machine that was too busy give themselves away.
    """

    def __init__(self) -> None:
        self._late = Histogram(_BOUNDS_S)
        self._most = 0.0
        self._lost = 0.0

    def delivered(self, late_s: float) -> None:
        """A step's tokens went out so many seconds after its end."""
        self._late.observe(late_s)
        self._most = max(self._most, late_s)

    def lost(self, seconds: float) -> None:
        """So much time is not caught up on: the engine was slower than its profile."""
        self._lost += seconds

    def to_json(self) -> dict[str, Any]:
        """``late_s`` in seconds; its p99 is the bound of a bucket, and at most twice too large."""
        steps = self._late.count
        nth = bisect_left(self._late.cumulative(), ceil(0.99 * steps))
        p99 = min([*_BOUNDS_S, self._most][nth], self._most)
        mean = self._late.sum / max(steps, 1)
        return {
            "steps": steps,
            "late_s": {"mean": mean, "p99": p99, "max": self._most},
            "lost_s": self._lost,
        }
