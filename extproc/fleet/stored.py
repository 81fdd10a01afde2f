"""Which replica holds a stored response: vLLM keeps each in the memory of one process."""

import asyncio
from collections import deque

MOST_STORED = 100_000
"""Responses remembered, the newest: 20 MB."""
_MOST_UNTOLD = 10_000


class StoredResponses:
    """Holders of responses, as far as this router saw them pass or was told by others."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}
        self._untold: deque[tuple[str, str]] = deque(maxlen=_MOST_UNTOLD)
        self._some_untold = asyncio.Event()

    def holder(self, response: str) -> str | None:
        """The replica, ``ip:port``, that holds the response of that id; None: not known."""
        return self._holders.get(response)

    def keep(self, response: str, replica: str) -> None:
        """That replica holds the response."""
        self._holders.pop(response, None)  # the newest stands last
        if len(self._holders) >= MOST_STORED:
            del self._holders[next(iter(self._holders))]
        self._holders[response] = replica

    def saw(self, response: str, replica: str) -> None:
        """That replica answered with the response; other routers are to be told."""
        self.keep(response, replica)
        self._untold.append((response, replica))
        self._some_untold.set()

    async def untold(self, most: int) -> list[tuple[str, str]]:
        """Wait for what others were not told, response and replica, and take the oldest of it."""
        await self._some_untold.wait()
        taken = [self._untold.popleft() for _ in range(min(most, len(self._untold)))]
        if not self._untold:
            self._some_untold.clear()
        return taken
