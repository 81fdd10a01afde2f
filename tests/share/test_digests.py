"""Routers' digests through a real Redis, which is killed and fed garbage."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from random import Random

import pytest
from msgspec import msgpack
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from extproc.config import Config
from extproc.fleet.digest import Digest, Kind
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import monotonic
from extproc.observe.metrics import RouterMetrics
from extproc.predict.lengths import OutputLengths
from extproc.proxy.sharing import share
from extproc.share import digests
from extproc.share.connection import Keys, connect
from extproc.share.digests import Connected, CutOff, DigestReader, DigestWriter, Heard, News
from extproc.share.envelope import VERSION
from tests.conftest import Logged, RedisServer
from tests.fakes import MODEL, ManualClock, chat, replica, state
from tests.patched import patched
from tests.share.servers import command
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

Next = Callable[[], Awaitable[News]]
A10 = "llama-8b-a10"
LIFE_MS = 60_000


@pytest.fixture(autouse=True)
def long_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest ends because this machine is busy."""
    monkeypatch.setattr(digests, "_LIFE_MS", LIFE_MS)


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[Next]:
    """Yield a function that awaits the reader's next news."""
    async with (
        connect(url, "test") as redis,
        aclosing(DigestReader(redis, "test", Random(1)).changes()) as news,
    ):

        async def following() -> News:
            async with asyncio.timeout(PATIENCE_S):
                return await anext(news)

        yield following


def router() -> Fleet:
    """A router with a request in flight."""
    clock = ManualClock()
    fleet = Fleet(OutputLengths(), clock, clock)
    fleet.put(state(1, A10, clock))
    fleet.dispatch(replica(1), chat(100))
    return fleet


def due(fleet: Fleet) -> Digest:
    fleet.digests.repeat()
    digest = fleet.digests.due(0.0)
    assert digest is not None
    return digest


async def heard(following: Next) -> Digest:
    news = await following()
    assert isinstance(news, Heard)
    return news.digest


async def test_a_reader_hears_what_is_there_and_then_what_comes(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    fleet, writer = router(), DigestWriter(redis_client, "test")
    first, began = due(fleet), monotonic()
    await writer.send(first)
    assert 0 < await redis_client.pttl(Keys("test").router + fleet.router) <= LIFE_MS
    async with reading(redis_server.url) as following:
        assert await following() == Connected()
        found = await following()
        assert isinstance(found, Heard)
        assert found.digest.encode() == first.encode()
        assert 0 <= found.age <= monotonic() - began + 0.01
        await writer.send(second := due(fleet))
        assert (await heard(following)).encode() == second.encode()
        await writer.send(last := fleet.digests.farewell())
        assert (await heard(following)).encode() == last.encode()
        assert not await redis_client.exists(Keys("test").router + fleet.router)


async def test_garbage_is_skipped_with_one_line(
    redis_server: RedisServer, redis_client: Redis, logged: Logged
) -> None:
    fleet, writer = router(), DigestWriter(redis_client, "test")
    await redis_client.set(Keys("test").router + "garbage", b"\x63 a later version")
    await redis_client.hset(Keys("test").router + "hash", "field", "value")
    async with reading(redis_server.url) as following:
        assert await following() == Connected()
        for _ in range(3):
            await redis_client.publish(Keys("test").digests, b"\x63 a later version")
            await redis_client.publish(Keys("test").digests, b"\x01 and what is none")
        await writer.send(first := due(fleet))
        assert (await heard(following)).encode() == first.encode()
    assert [line["source"] for line in logged.lines()] == [
        Keys("test").router + "garbage",
        Keys("test").digests,
    ]


async def test_a_full_redis_still_pushes(redis_server: RedisServer, redis_client: Redis) -> None:
    fleet, writer = router(), DigestWriter(redis_client, "test")
    async with reading(redis_server.url) as following:
        assert await following() == Connected()
        await redis_client.config_set("maxmemory", 1)
        await writer.send(whole := due(fleet))
        assert (await heard(following)).encode() == whole.encode()
        assert await redis_client.dbsize() == 0


async def test_a_user_who_may_not_ask_for_the_life_of_keys_breaks_nothing(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    fleet = router()
    await DigestWriter(redis_client, "test").send(due(fleet))
    rights = ("on", "nopass", "~*", "&*", "+@all", "-pttl")
    await command(redis_client, "ACL", "SETUSER", "reader", *rights)
    url = f"redis://reader:any@127.0.0.1:{redis_server.port}"
    async with reading(url) as following:
        assert await following() == Connected()
        await DigestWriter(redis_client, "test").send(last := due(fleet))
        assert (await heard(following)).encode() == last.encode()


async def test_redis_that_is_killed_and_comes_back_empty(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    fleet, writer = router(), DigestWriter(redis_client, "test")
    async with reading(redis_server.url) as following:
        assert await following() == Connected()
        await redis_server.kill()
        assert await following() == CutOff()
        await redis_server.start()
        while await following() != Connected():
            pass
        await writer.send(first := due(fleet))
        assert (await heard(following)).encode() == first.encode()


async def test_routers_count_each_others_requests_until_one_stops(
    redis_server: RedisServer,
) -> None:
    config = Config.model_validate({"pool": "test", "redis": {"url": redis_server.url}})
    fleets = [Fleet(OutputLengths()) for _ in range(2)]
    sharing, registry = [], CollectorRegistry()
    for fleet in fleets:
        fleet.put(state(1, A10, ManualClock()))
        metrics = RouterMetrics(registry if fleet is fleets[0] else CollectorRegistry())
        sharing.append(asyncio.create_task(share(config, fleet, metrics)))
    one, two = fleets
    one.dispatch(replica(1), chat(100))
    try:
        await _sees(two, 1)
        await until(lambda: bool(registry.get_sample_value("extproc_redis_seconds_count")))
        await redis_server.kill()
        await _sees(two, 0)
        await until(lambda: len(two.view(MODEL)) and two.peers.stale)
        await redis_server.start()
        await _sees(two, 1)
        sharing[0].cancel()
        # A second cancellation would meet redis-py as it closes, and leave connections open.
        await asyncio.wait(sharing[:1])
        await until(lambda: len(two.peers) == 0)
        await _sees(two, 0)
    finally:
        for task in sharing:
            task.cancel()
        ended = await asyncio.gather(*sharing, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)


async def test_messages_of_a_later_version_are_counted_in_the_metrics(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    config = Config.model_validate({"pool": "test", "redis": {"url": redis_server.url}})
    registry = CollectorRegistry()
    future = msgpack.encode(["new", VERSION + 1, []])
    await redis_client.set(Keys("test").router + "later", future)
    await redis_client.xadd(Keys("test").responses, {"": future})
    await redis_client.rpush(Keys("test").blocks + replica(1), future)
    sharing = asyncio.create_task(share(config, Fleet(OutputLengths()), RouterMetrics(registry)))
    name, labels = "extproc_redis_skipped_total", {"reason": "unknown_tag"}
    try:
        await until(lambda: registry.get_sample_value(name, labels) == 3)
    finally:
        sharing.cancel()
        await asyncio.gather(sharing, return_exceptions=True)


async def test_a_router_that_is_told_to_stop_says_farewell(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    flags = ("--serve.listen=127.0.0.1:0", "--serve.admin=127.0.0.1:0", "--pool=test")
    patient = {
        f"extproc.share.{module}.TIMEOUT_S": PATIENCE_S for module in ("connection", "reader")
    }
    async with reading(redis_server.url) as following:
        assert await following() == Connected()
        process = await asyncio.create_subprocess_exec(
            *patched(patient, "serve", "--redis.url", redis_server.url, *flags),
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            assert (await heard(following)).kind is Kind.WHOLE
            await redis_client.client_pause(300, all=False)  # all else ends long before
            process.terminate()
            while (await heard(following)).kind is not Kind.FAREWELL:
                pass
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()


async def _sees(fleet: Fleet, requests: int) -> None:
    await until(lambda: fleet.view(MODEL).requests[0] == requests)
