"""Waits between attempts at something that fails."""

from random import Random


class Backoff:
    """Seconds to wait: doubled from ``first_s`` up to ``most_s``, then cut at random by up to half.

    The random cut keeps many clients of one failed server from coming back in step.
    """

    def __init__(self, first_s: float, most_s: float, random: Random) -> None:
        self._first_s = self._next_s = min(first_s, most_s)
        self._most_s = most_s
        self._random = random

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        return wait_s * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start anew after a success."""
        self._next_s = self._first_s
