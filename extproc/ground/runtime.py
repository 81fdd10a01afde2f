"""Runs of programs: until a signal, with waits between attempts, with work on threads."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from random import Random
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

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


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Runs ``work`` on a thread of its own, for calls that may hang, such as name resolution.

    The thread goes on when the caller is cancelled, and does not delay the end of the program.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


async def in_turns(steps: Iterable[None]) -> None:
    """Takes the steps one by one, with other work of the loop in between."""
    for _ in steps:
        await asyncio.sleep(0)


class Backoff:
    """Seconds to wait: doubled from ``first_s`` up to ``most_s``, then cut at random by up to half.

    The random cut keeps many clients of one failed server from coming back in step.
    """

    def __init__(self, first_s: float, most_s: float, random: Random) -> None:
        self._first_s = self._next_s = min(first_s, most_s)
        self._most_s = most_s
        self._random = random

    def next(self) -> float:
        """Returns the seconds to wait after one more failure."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        return wait_s * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Starts anew after a success."""
        self._next_s = self._first_s
