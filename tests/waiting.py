"""How long tests wait for what has to come: a busy machine is slow, not wrong."""

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar

PATIENCE_S = 60.0

T = TypeVar("T")


async def until(holds: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Returns when something is so that nobody signals; it may have to be awaited.

    Raises:
        TimeoutError: it is not so in time.
    """
    async with asyncio.timeout(seconds):
        while True:
            now = holds()
            if await now if isawaitable(now) else now:
                return
            await asyncio.sleep(0.01)


async def until_read(read: Callable[[], Awaitable[T]], holds: Callable[[T], object]) -> None:
    """Reads again and again until a reading is as wanted."""

    async def so() -> bool:
        return bool(holds(await read()))

    await until(so)
