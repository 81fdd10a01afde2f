"""How the operating system schedules gRPC's threads beside the one that runs Python."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def patient() -> Iterator[None]:
    """Threads that are started inside the block, and those that they start, wait their turn.

    gRPC reads sockets and completes its operations in threads of its own, several wake-ups a
    message. Linux lets a thread that wakes up interrupt the one that runs on its core; under
    ``SCHED_BATCH`` it waits until that one pauses, and finds the work of several messages at once:
    a seventh less CPU a request where the router's core is busy (docs/results.md). A thread that
    wakes up while a core is idle runs at once, as ever. Elsewhere than on Linux nothing changes.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    _schedule(os.SCHED_BATCH)
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER)


def _schedule(policy: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it: then all threads are alike
            os.sched_setscheduler(0, policy, os.sched_param(0))
