"""Programs that run until they are told to stop."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

_STOP = (signal.SIGTERM, signal.SIGINT)


async def until_signalled(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs the parts side by side until SIGTERM or SIGINT, which cancels them.

    Raises:
        ExceptionGroup: a part failed; the others are cancelled.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in _STOP:
        loop.add_signal_handler(number, stop.set)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(part) for part in parts]
            await stop.wait()
            for part in running:
                part.cancel()
    finally:
        for number in _STOP:
            loop.remove_signal_handler(number)
