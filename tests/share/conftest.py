"""Readers, writers and routers that share a Redis."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TypeVar

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from extproc.config import Config, RedisSettings
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import monotonic, wall
from extproc.ground.runtime import started
from extproc.observe.history import Delays
from extproc.observe.metrics import RouterMetrics
from extproc.predict.lengths import OutputLengths
from extproc.proxy.sharing import share
from extproc.replica_state import ReplicaState
from extproc.share.connection import connect
from extproc.share.reader import Reader
from extproc.share.replicas import Change, Snapshot, StateReader, StateWriter
from tests.conftest import Logged, RedisServer
from tests.fakes import ManualClock, state
from tests.share.servers import command
from tests.waiting import PATIENCE_S

ACL = (
    "~{test}:* resetchannels &{test}:* +@read +@write +@pubsub +@connection +@scripting "
    "+@transaction -@dangerous"
)
"""The rule in docs/operations/secure.md, for the pool ``test``."""

A = ReplicaState(id="10.0.0.1:8000", name="a", running=3, kv_usage=0.25, models=("m", "lora"))
B = ReplicaState(
    id="[::1]:8000", name="b", waiting=7, healthy=False, problem="/health answered 503"
)

LOST = "redis is lost, retrying"
BACK = "redis is back"

Next = Callable[[], Awaitable[Change]]
Pair = tuple[Fleet, Fleet]
T = TypeVar("T")


@asynccontextmanager
async def hearing(
    kind: Callable[[Redis, str], Reader[T]], url: RedisSettings | str, pool: str = "test"
) -> AsyncIterator[Callable[[], Awaitable[T]]]:
    async with connect(url, pool) as redis, aclosing(kind(redis, pool).changes()) as changes:

        async def following() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await anext(changes)

        yield following


reading = partial(hearing, StateReader)


async def until(following: Next, wanted: Change) -> None:
    while await following() != wanted:
        pass


async def lost(url: RedisSettings | str, logged: Logged) -> dict[str, object]:
    async with reading(url) as following:
        waiting = asyncio.ensure_future(following())
        line = await logged.line(LOST)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    return line


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture
async def following(url: str) -> AsyncIterator[Next]:
    """Function that returns the next change in a pool, which is empty at first."""
    async with reading(url) as following:
        assert await following() == Snapshot(())
        yield following


@pytest.fixture
def writer(redis_client: Redis) -> StateWriter:
    return StateWriter(redis_client, "test", ttl_s=60)


@pytest.fixture
async def limited_url(redis_server: RedisServer, redis_client: Redis) -> AsyncIterator[str]:
    """URL of a user with the rights of ``ACL``; fails if Redis refuses the user anything."""
    await command(redis_client, "ACL", "SETUSER", "router", "on", ">secret", *ACL.split())
    yield f"redis://router:secret@127.0.0.1:{redis_server.port}"
    assert await refused_commands(redis_client) == []


async def refused_commands(redis: Redis) -> list[bytes]:
    found = [entry[b"object"] for entry in await command(redis, "ACL", "LOG")]
    return [name for name in found if name != b"client"]  # of redis-py, which goes on; only in 6.2


@asynccontextmanager
async def router(
    url: str, registry: CollectorRegistry | None = None, members: int = 2
) -> AsyncIterator[Fleet]:
    fleet = Fleet(OutputLengths())
    for number in range(1, members + 1):
        fleet.put(state(number, "llama-8b-a10", ManualClock(wall())))
        fleet.members_known.set()
    config = Config.model_validate({"pool": "test", "redis": {"url": url}})
    metrics = RouterMetrics(registry or CollectorRegistry())
    async with started(share(config, fleet, metrics, Delays(monotonic))) as [task]:
        yield fleet
    assert task.cancelled()


@pytest.fixture
async def routers(redis_server: RedisServer) -> AsyncIterator[Pair]:
    async with router(redis_server.url) as first, router(redis_server.url) as second:
        yield first, second
