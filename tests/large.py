"""A large fleet, and whether a router is kept from its requests by it."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from extproc.replica_state import ReplicaState
from tests.fakes import ManualClock, state

REPLICAS = 1000
_TIMES = 5
A_FEW_MS = 0.02
"""Seconds, on a machine that is slow or busy; a tenth of what Envoy waits for the router."""


def thousand_states() -> tuple[ReplicaState, ...]:
    clock = ManualClock()
    return tuple(
        state(0, "llama-8b-a10", clock, id=f"10.1.{number // 250}.{number % 250}:8000")
        for number in range(REPLICAS)
    )


async def assert_event_loop_is_free(work: Callable[[], Awaitable[object]]) -> None:
    """The event loop does a little of the work in each turn. What takes long once of several times
    is not the work: some of what others do on a busy machine is counted as this thread's."""
    pieces: list[float] = []
    while not pieces or pieces[-1] >= A_FEW_MS:
        assert len(pieces) < _TIMES, f"it takes {pieces} s"
        async with _longest_piece() as longest:
            await work()
        pieces.append(longest[0])


@asynccontextmanager
async def _longest_piece() -> AsyncIterator[list[float]]:
    """What the event loop did between two turns, at most: seconds of this thread's CPU."""
    longest = [0.0]

    async def measure() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest[0] = max(longest[0], time.thread_time() - before)

    gc.collect()
    gc.freeze()  # as a router does at its start; of the tests before there may be much
    task = asyncio.create_task(measure())
    try:
        yield longest
    finally:
        task.cancel()
        gc.unfreeze()
