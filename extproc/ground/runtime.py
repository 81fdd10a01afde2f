"""Parts of asyncio programs: signals, open files, threads for calls that hang, backoff."""

import asyncio
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import Random
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_FILES = 10_240  # open files if the hard limit is infinite: macOS refuses more


def allow_many_connections() -> None:
    """Raises this process's limit of open files as far as the system allows: each connection needs
    a file, and the usual limit of 1,024 is meant for programs that call ``select``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    files = max(soft, _FILES) if hard == resource.RLIM_INFINITY else hard
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


async def until_signalled(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs the parts concurrently until SIGTERM or SIGINT, which cancels them.

    Raises:
        OSError: a part failed with it, such as an address in use; the others are cancelled.
        ExceptionGroup: a part failed otherwise; the others are cancelled.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(part) for part in parts]
            await stop.wait()
            for part in running:
                part.cancel()
    except ExceptionGroup as group:
        if isinstance(error := group.exceptions[0], OSError):
            raise error from None
        raise
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Runs ``work`` on a new thread, for calls that may hang, such as name resolution.

    Cancelling the caller does not stop the thread; the thread does not delay the program's exit.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # the future cannot be cancelled from now on

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


class SlowCall(Generic[T]):
    """A call that may hang, made repeatedly but never twice at a time.

    A call that takes longer than ``timeout_s`` goes on; the next :meth:`result` uses its result.
    """

    def __init__(self, call: Callable[[], Awaitable[T]], timeout_s: float) -> None:
        self._call = call
        self._timeout_s = timeout_s
        self._running: asyncio.Future[T] | None = None

    async def result(self) -> T:
        """Returns the call's result, or raises its exception; TimeoutError if there is none yet."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._call())
            # Retrieves the exception of an abandoned call; asyncio would log it otherwise.
            self._running.add_done_callback(lambda call: call.cancelled() or call.exception())
        await asyncio.wait([self._running], timeout=self._timeout_s)
        if not self._running.done():
            raise TimeoutError(f"no answer within {self._timeout_s:g} s")
        call, self._running = self._running, None
        return call.result()


async def look_up(host: str) -> list[str]:
    """Asks the system's resolver for the IP addresses of a host, on a thread of its own.

    A lookup has no timeout and cannot be cancelled. The event loop's own ``getaddrinfo`` shares a
    few threads (uvloop: four), which a silent name server would occupy.

    Raises:
        OSError: the name has no address, or no name server answers.
        UnicodeError: the name is no valid host name.
    """
    ask = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in await in_daemon_thread(ask)]


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs the parts concurrently until all have ended. If a part fails, cancels the others and
    raises an ExceptionGroup."""
    async with asyncio.TaskGroup() as tasks:
        for part in parts:
            tasks.create_task(part)


@asynccontextmanager
async def started(*parts: Coroutine[Any, Any, T]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Runs the parts as tasks inside the block; at its end, cancels the tasks that still run."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_turns(steps: Iterable[None]) -> None:
    """Runs the steps one by one; between two steps, the event loop may do other work."""
    for _ in steps:
        await asyncio.sleep(0)


class Backoff:
    """Wait after each failure, in seconds: doubles from ``first_s`` up to ``most_s``.

    Each wait is shortened by a random part, up to half, so that the clients of a failed server do
    not return at the same time.
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
        self._next_s = self._first_s
