"""Waits between attempts at something that fails."""

from random import Random

_MOST_DOUBLINGS = 32


class Backoff:
    """Seconds to wait: doubled from ``first_s`` up to ``most_s``, then cut at random by up to half.

    The random cut keeps many clients of one failed server from coming back in step.
    """

    def __init__(self, first_s: float, most_s: float, random: Random) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._random = random
        self._failures = 0

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        wait_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, _MOST_DOUBLINGS))
        self._failures += 1
        return wait_s * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start anew after a success."""
        self._failures = 0
