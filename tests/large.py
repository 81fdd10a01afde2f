"""A large fleet, a count of bytecodes, and a check that work does not block the event loop."""

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

from extproc.replica_state import ReplicaState
from tests.fakes import ManualClock, state

REPLICAS = 1000
_TIMES = 5
A_FEW_MS = 0.02
"""Seconds, generous for a slow or busy machine; a tenth of Envoy's timeout for the router."""


def thousand_states() -> tuple[ReplicaState, ...]:
    clock = ManualClock()
    return tuple(
        state(0, "llama-8b-a10", clock, id=f"10.1.{number // 250}.{number % 250}:8000")
        for number in range(REPLICAS)
    )


def bytecodes(work: Callable[[], object]) -> int:
    """Counts the bytecodes of the work; unlike times, they do not depend on the machine's load."""
    executed = [0]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        executed[0] += event == "opcode"
        return trace

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(tracer)
    return executed[0]


async def assert_event_loop_is_free(work: Callable[[], Awaitable[object]]) -> None:
    """Asserts that no turn of the event loop takes ``A_FEW_MS`` of CPU time, without the time of a
    tracer such as that of coverage, which makes the same work take four times as long.

    A single run out of ``_TIMES`` suffices: other processes of a busy machine add to CPU times.
    """
    pieces: list[float] = []
    while not pieces or pieces[-1] >= A_FEW_MS:
        assert len(pieces) < _TIMES, f"the event loop is blocked for {pieces} s"
        async with _longest_piece() as longest:
            await work()
        pieces.append(longest[0])


@asynccontextmanager
async def _longest_piece() -> AsyncIterator[list[float]]:
    """Measures the longest turn of the event loop, in CPU seconds of this thread."""
    longest = [0.0]

    async def measure() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest[0] = max(longest[0], time.thread_time() - before)

    gc.collect()
    gc.freeze()  # as a router does at its start; for good, as the tests' modules are frozen, too
    task, tracer = asyncio.create_task(measure()), sys.gettrace()
    sys.settrace(None)
    try:
        yield longest
    finally:
        sys.settrace(tracer)
        task.cancel()
