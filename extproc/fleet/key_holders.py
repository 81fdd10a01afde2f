"""Which replicas hold which keys of prompts."""

from collections.abc import Iterable
from itertools import repeat


class KeyHolders:
    """For each key a number in which every replica has a bit: of a thousand replicas, whoever holds
    a key is found in one look."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def add(self, keys: Iterable[int], bit: int) -> None:
        """The replica with that bit holds these keys now."""
        masks, one = self._masks, 1 << bit
        for key in keys:
            masks[key] = masks.get(key, 0) | one

    def drop(self, keys: Iterable[int], bit: int) -> None:
        """It does no longer, and did."""
        masks, others = self._masks, ~(1 << bit)
        for key in keys:
            left = masks[key] & others
            if left:
                masks[key] = left
            else:
                del masks[key]

    def mask(self, key: int) -> int:
        """Who holds a key; 0: nobody."""
        return self._masks.get(key, 0)

    def masks(self, keys: Iterable[int]) -> list[int]:
        """Who holds each of these keys; 0: nobody."""
        return list(map(self._masks.get, keys, repeat(0)))
