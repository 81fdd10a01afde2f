"""A histogram as Prometheus knows it."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self._counts)

    def cumulative(self) -> list[int]:
        """Values up to each bound; the last entry counts them all."""
        total, counts = 0, []
        for count in self._counts:
            total += count
            counts.append(total)
        return counts
