"""A histogram as Prometheus knows it."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self.counts = [0] * (len(self.bounds) + 1)
        """Values from bound to bound; the last entry counts those above all."""

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """Values up to each bound; the last entry counts them all."""
        return list(accumulate(self.counts))
