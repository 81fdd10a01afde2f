"""What the client itself uses of its core: a client that is busy measures itself."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from extproc.clock import Clock

_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Effort:
    """CPU time of this process."""

    cpu_s: float
    busiest_second: float
    """The largest share of a core in any second."""


async def watch(
    work: Coroutine[None, None, None], tick: Callable[[], None], clock: Clock
) -> Effort:
    """Runs the work to its end, and calls ``tick`` every second meanwhile."""
    task = asyncio.ensure_future(work)
    begun = since_cpu = time.process_time()
    since, busiest = clock(), 0.0
    while not task.done():
        await asyncio.wait({task}, timeout=_EVERY_S)
        now, cpu = clock(), time.process_time()
        if now - since > _EVERY_S / 2 or not busiest:  # the last bit of a second says little
            busiest = max(busiest, (cpu - since_cpu) / max(now - since, 1e-9))
        since, since_cpu = now, cpu
        tick()
    await task
    return Effort(since_cpu - begun, busiest)
