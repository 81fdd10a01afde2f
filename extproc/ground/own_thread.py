"""Work that may hang, on a thread of its own: it holds up nothing, not even a program's end."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T]) -> T:
    """What the work returns or raises; it goes on by itself where nobody waits for it any more."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)
