"""A router follows the states that pollers write to Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from extproc.fleet.fleet import Fleet
from extproc.ground.clock import monotonic, wall
from extproc.observe.history import Delays
from extproc.observe.metrics import RouterMetrics
from extproc.predict.lengths import OutputLengths
from extproc.proxy.sharing import share
from extproc.share.connection import connect
from extproc.share.replicas import StateWriter
from tests.conftest import Logged, RedisServer
from tests.fakes import MODEL, ManualClock, chat, state
from tests.large import assert_event_loop_is_free, thousand_states
from tests.proxy.conftest import config_of
from tests.waiting import until

pytestmark = pytest.mark.process

LIFE_S = 60.0
SKEW_S = 120.0


@asynccontextmanager
async def following(server: RedisServer) -> AsyncIterator[Fleet]:
    """A fleet that follows the states in Redis."""
    fleet = Fleet(OutputLengths())
    config, metrics = config_of(redis={"url": server.url}), RouterMetrics(CollectorRegistry())
    task = asyncio.create_task(share(config, fleet, metrics, Delays(monotonic)))
    try:
        yield fleet
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_poller_clock_skew_changes_no_progress(
    redis_server: RedisServer, redis_client: Redis, logged: Logged
) -> None:
    async with connect(redis_server.url, "default") as redis, following(redis_server) as fleet:
        writer = StateWriter(redis, "default", LIFE_S)
        clock = ManualClock(wall() - SKEW_S)
        first = state(1, "llama-8b-a10", clock, running=1, steps=1300.0, life_s=LIFE_S)
        await writer.put([first])
        await until(lambda: [*fleet.members] == [first])
        fleet.dispatch(first.id, chat(10, 2000))
        fleet.first_token(fleet.dispatch(first.id, chat(10, 2000)))
        before = fleet.sequences(fleet.view(MODEL)).remaining.max()
        await redis.client_kill_filter(_type="pubsub")
        await logged.line("redis is back")
        await writer.put([other := state(2, "llama-8b-a10", clock)])
        await until(lambda: [*fleet.members] == [first, other])
        after = fleet.sequences(fleet.view(MODEL)).remaining.max()
        assert after > before - 200  # otherwise the skew would count as steps done


async def test_large_snapshot_does_not_delay_requests(redis_server: RedisServer) -> None:
    replicas = thousand_states()
    async with connect(redis_server.url, "default") as redis:
        await StateWriter(redis, "default", LIFE_S).put(replicas)

    async def follow() -> None:
        async with following(redis_server) as fleet:
            await until(lambda: len(fleet.members) == len(replicas))

    await assert_event_loop_is_free(follow)
