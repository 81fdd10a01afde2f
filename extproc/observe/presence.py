"""Routers or pollers of a pool that are alive, and those that left lately."""

import logging
from collections.abc import Collection

from extproc.ground.clock import time_of_day

logger = logging.getLogger(__name__)

_REMEMBERED_S = 600.0  # time for which a process that left is shown


class Presence:
    """Names of the living processes of one kind; the resolution is the time between two looks."""

    def __init__(self, kind: str, pool: str) -> None:
        """``kind``: routers or pollers; this and ``pool`` are for the log."""
        self._kind = kind
        self._pool = pool
        self._alive: frozenset[str] | None = None  # None: not known yet
        self._gone: dict[str, float] = {}  # since when, in seconds since the epoch

    def look(self, alive: Collection[str], now: float) -> None:
        """Compare with the last look, and log changes; ``now``: seconds since the epoch."""
        before, self._alive = self._alive, frozenset(alive)
        left = frozenset() if before is None else before - self._alive
        if before is not None and before != self._alive:
            joined = sorted(self._alive - before)
            names = {"joined": ", ".join(joined), "left": ", ".join(sorted(left))}
            extra = {"pool": self._pool} | names
            logger.info(f"{self._kind} of the pool changed", extra=extra)
        self._gone = {
            name: since
            for name, since in (self._gone | dict.fromkeys(left, now)).items()
            if name not in self._alive and now - since < _REMEMBERED_S
        }

    @property
    def gone(self) -> str:
        """Processes that left in the last ten minutes, with since when; empty: none."""
        gone = self._gone.items()
        return ", ".join(f"{name} (since {time_of_day(since)})" for name, since in gone)
