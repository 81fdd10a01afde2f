"""Who holds which response, through a real Redis, which is killed and fed garbage."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from random import Random
from typing import Any

import pytest
from redis.asyncio import Redis

from extproc.fleet.fleet import Fleet
from extproc.proxy import sharing as shared
from extproc.share.connection import Keys, connect
from extproc.share.streams import OWNER, Owner, StreamReader, StreamWriter
from tests.conftest import RedisServer
from tests.fakes import replica
from tests.share.conftest import Pair, router
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

Next = Callable[[], Awaitable[str]]


async def knows(fleet: Fleet, *names: str) -> None:
    await until(lambda: all(fleet.holder(name) == replica(2) for name in names))


@pytest.mark.parametrize("protocol", [2, 3])
async def test_owners_reach_present_and_later_routers(
    limited_url: str, redis_client: Redis, protocol: int
) -> None:
    url = f"{limited_url}/0?protocol={protocol}"
    names = [f"resp_{number}" for number in range(250)]
    async with router(url) as first:
        async with router(url) as second:
            for name in names[:200]:
                first.responses.saw(name, replica(2))
            await knows(second, *names[:200])
            for name in names[200:]:
                second.responses.saw(name, replica(2))
            await knows(first, *names[200:])
        async with router(url) as third:
            await knows(third, *names)
    assert 0 < await redis_client.ttl(Keys("test").responses) <= 86_400


async def test_redis_bounds_response_owners(
    redis_server: RedisServer, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "MOST_HELD", 200)
    async with router(redis_server.url) as first, router(redis_server.url) as second:
        for number in range(1_000):
            first.responses.saw(f"resp_{number}", replica(2))
        await knows(second, "resp_999")
    kept = await redis_client.xlen(Keys("test").responses)
    assert 200 <= kept <= 400  # whole nodes of a hundred go


async def test_owners_seen_during_outage_are_told_later(
    redis_server: RedisServer, routers: Pair
) -> None:
    first, second = routers
    first.responses.saw("resp_before", replica(2))
    await knows(second, "resp_before")
    await redis_server.kill()
    for name in ("resp_1", "resp_2"):
        first.responses.saw(name, replica(2))
        assert first.holder(name) == replica(2)
        await asyncio.sleep(0)
    await redis_server.start()  # empty
    await knows(second, "resp_before", "resp_1", "resp_2")


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[Next]:
    """Yield a function that awaits the next response that a router hears of."""
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def listen(redis: Redis) -> None:
        reader = StreamReader(redis, Keys("test").responses, OWNER, Random(1))
        async with aclosing(reader.changes()) as owners:
            async for owner in owners:
                heard.put_nowait(owner.thing)

    async def following() -> str:
        async with asyncio.timeout(PATIENCE_S):
            return await heard.get()

    async with connect(url, "test") as redis, asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(listen(redis))
        yield following
        listening.cancel()


async def is_reading(client: Redis) -> bool:
    """Whether somebody waits for the next entry."""
    return any("b" in one["flags"] for one in await client.client_list())


async def test_disconnected_reader_resumes(redis_server: RedisServer, redis_client: Redis) -> None:
    """A hundred thousand entries take a router seconds."""
    writer = StreamWriter(redis_client, Keys("test").responses, OWNER, 100)
    async with reading(redis_server.url) as following:
        await writer.send([Owner("resp_1", replica(2))])
        assert await following() == "resp_1"
        await until(lambda: is_reading(redis_client))
        assert await redis_client.client_kill_filter(_type="normal", skipme=True)
        await writer.send([Owner("resp_2", replica(2))])
        assert await following() == "resp_2"


async def test_reader_tolerates_earlier_redis_clock(
    redis_server: RedisServer,
) -> None:
    async with reading(redis_server.url) as following:
        async with connect(redis_server.url, "test") as client:
            first: Any = {"": OWNER.seal(Owner("resp_1", replica(2)))}
            await client.xadd(Keys("test").responses, first, id="9999999999999-0")
            assert await following() == "resp_1"
            await until(lambda: is_reading(client))
        await redis_server.kill()
        await redis_server.start()
        async with connect(redis_server.url, "test") as client:
            writer = StreamWriter(client, Keys("test").responses, OWNER, 100)
            await writer.send([Owner("resp_2", replica(2))])
            assert await following() == "resp_2"


async def test_garbage_owners_are_skipped(redis_server: RedisServer, redis_client: Redis) -> None:
    key = Keys("test").responses
    await redis_client.set(key, "no stream")
    async with router(redis_server.url) as first, router(redis_server.url) as second:
        first.responses.saw("resp_1", replica(2))
        await redis_client.delete(key)
        for garbage in (b"", b"\xff", b"nowhere"):
            await redis_client.xadd(key, {"": garbage})
        await redis_client.xadd(key, {b"\xff\xfe": b"\xff", "resp_x": "nowhere"})
        first.responses.saw("resp_2", replica(2))
        await knows(second, "resp_1", "resp_2")
        assert second.holder("resp_x") is None
