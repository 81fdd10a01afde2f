"""Waits of tests, long enough for a busy machine."""

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar

PATIENCE_S = 60.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.05

T = TypeVar("T")


async def until(holds: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Polls a condition, awaited if necessary, until it holds. Pauses grow, because each poll costs
    the polled process milliseconds.

    Raises:
        TimeoutError: the condition does not hold in time.
    """
    pause_s = _SHORTEST_PAUSE_S
    async with asyncio.timeout(seconds):
        while True:
            now = holds()
            if await now if isawaitable(now) else now:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)


async def until_read(read: Callable[[], Awaitable[T]], holds: Callable[[T], object]) -> T:
    """Reads repeatedly until the condition holds for the value; returns the value."""
    values = list[T]()

    async def holds_now() -> bool:
        values[:] = [await read()]
        return bool(holds(values[0]))

    await until(holds_now)
    return values[0]


class Changes:
    """Lets coroutines wait until a condition holds, which can change only when this is noted."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def note(self) -> None:
        self._event.set()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._event.clear()
                await self._event.wait()
