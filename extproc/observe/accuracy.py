"""Predicted and actual times of the last requests that ended."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

_KEPT = 5000


@dataclass(frozen=True, slots=True)
class Ended:
    """A request whose end was seen, on the replica that it was predicted for."""

    at: float
    """When, by the router's clock."""
    replica: str
    """``ip:port``."""
    predicted_s: float
    actual_s: float
    """From the decision to the last token."""
    expected_cached: float
    """Tokens of its prompt that the replica should have had, by what was sent there."""
    cached: int | None
    """Those that it found; None where it does not tell."""


class Accuracy:
    """The last of them, in memory."""

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque(maxlen=_KEPT)
        self.added = 0
        """How many there were, in all."""

    def add(self, one: Ended) -> None:
        """It ended now."""
        self._ended.append(one)
        self.added += 1

    def since(self, at: float) -> Iterator[Ended]:
        """Those that ended then or later, the newest first."""
        return takewhile(lambda one: one.at >= at, reversed(self._ended))
