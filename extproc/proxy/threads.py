"""How the operating system schedules gRPC's threads beside the one that runs Python."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def patient() -> Iterator[None]:
    """Threads that are started inside the block, and those that they start, wait their turn.

    gRPC reads sockets and completes its operations in threads of its own, several wake-ups a
    message. Linux lets a thread that wakes up interrupt the one that runs on its core; under
    ``SCHED_BATCH`` it waits until that one pauses, and finds the work of several messages at once:
    a seventh less CPU a request where the router's core is busy, measured with
    ``benchmarks.overhead``. A thread that
    wakes up while a core is idle runs at once, as ever. Elsewhere than on Linux nothing changes.
    """
    patient_now = _schedule("SCHED_BATCH", instead_of="SCHED_OTHER")
    try:
        yield
    finally:
        if patient_now:
            _schedule("SCHED_OTHER", instead_of="SCHED_BATCH")


def _schedule(policy: str, instead_of: str) -> bool:
    """Returns whether the calling thread is scheduled so from now on, and was as ``instead_of``."""
    if sys.platform != "linux":
        return False
    try:
        if os.sched_getscheduler(0) != getattr(os, instead_of):
            return False
        os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))
    except OSError:  # musl has no such call, a sandbox may forbid it: then all threads are alike
        return False
    return True
