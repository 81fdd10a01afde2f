"""Which replica holds what: stored responses, which vLLM keeps in the memory of one process, and
sessions, whose prefixes are in its cache."""

import asyncio
from collections import deque

MOST_HELD = 100_000
"""Things remembered, the newest: 20 MB."""
_MOST_UNTOLD = 10_000


class Holders:
    """Holders of things of one kind, as far as this router saw it or was told by others."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}
        self._untold: deque[tuple[str, str]] = deque(maxlen=_MOST_UNTOLD)
        self._some_untold = asyncio.Event()

    def holder(self, thing: str) -> str | None:
        """The replica, ``ip:port``, that holds the thing of that id; None: not known."""
        return self._holders.get(thing)

    def keep(self, thing: str, replica: str) -> None:
        """That replica holds the thing."""
        self._holders.pop(thing, None)  # the newest stands last
        if len(self._holders) >= MOST_HELD:
            del self._holders[next(iter(self._holders))]
        self._holders[thing] = replica

    def saw(self, thing: str, replica: str) -> None:
        """That replica got the thing; other routers are to be told where they may not know. An
        empty id is none."""
        if not thing:
            return
        if self._holders.get(thing) != replica:
            self._untold.append((thing, replica))
            self._some_untold.set()
        self.keep(thing, replica)

    async def untold(self, most: int) -> list[tuple[str, str]]:
        """Wait for what others were not told, things and replicas, and take the oldest of it."""
        await self._some_untold.wait()
        taken = [self._untold.popleft() for _ in range(min(most, len(self._untold)))]
        if not self._untold:
            self._some_untold.clear()
        return taken
