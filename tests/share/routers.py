"""Routers without a server, that share through a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import wall
from extproc.observe.metrics import RouterMetrics
from extproc.predict.lengths import OutputLengths
from extproc.proxy.sharing import share
from tests.fakes import ManualClock, state


@asynccontextmanager
async def router(url: str) -> AsyncIterator[Fleet]:
    """A router's fleet of two replicas, on the clocks that sharing goes by."""
    fleet = Fleet(OutputLengths())
    for number in (1, 2):
        fleet.put(state(number, "llama-8b-a10", ManualClock(wall())))
    fleet.known.set()
    config = Config.model_validate({"pool": "test", "redis": {"url": url}})
    task = asyncio.create_task(share(config, fleet, RouterMetrics(CollectorRegistry())))
    try:
        yield fleet
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
