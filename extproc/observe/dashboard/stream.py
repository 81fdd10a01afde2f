"""The page's news: one snapshot for all who look, and none while nobody does."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from pydantic_core import to_json

from extproc.observe.dashboard.pool import Pool
from extproc.observe.dashboard.snapshot import snapshot

EVERY_S = 1.0
"""Seconds between two snapshots."""
_EARLY_S = 0.01
"""Seconds by which a timer may be early."""


class Live:
    """Snapshots of a router's pools, the same for all viewers."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = pools
        self._clock = pools[0].clock
        self._making = asyncio.Lock()
        self._last = b""
        self._next_at = self._clock()

    async def frames(self) -> AsyncIterator[bytes]:
        """Each snapshot as JSON, for ever; whoever is slow misses some."""
        while True:
            async with self._making:
                if self._clock() >= self._next_at - _EARLY_S:
                    self._last = to_json(await snapshot(self._pools), inf_nan_mode="null")
                    self._next_at = self._clock() + EVERY_S
            yield self._last
            await asyncio.sleep(max(self._next_at - self._clock(), 0.0))
