"""Digests in Redis: routers count the requests of living peers, and survive an outage."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest
from msgspec import msgpack
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from extproc.fleet.digest import Digest, DigestKind
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import monotonic
from extproc.lab.harness.processes import free_port
from extproc.share import digests
from extproc.share.connection import Keys
from extproc.share.digests import (
    DIGEST,
    Connected,
    DigestEvent,
    DigestReader,
    DigestReceived,
    living_routers,
    send_digest,
)
from tests.conftest import Logged, RedisServer
from tests.fakes import A10, MODEL, ManualClock, chat, fleet_of, replica
from tests.patched import patched
from tests.share.conftest import LOST, hearing, router
from tests.share.servers import command
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

Next = Callable[[], Awaitable[DigestEvent]]
LIFE_MS = 60_000
reading = partial(hearing, DigestReader)


@pytest.fixture(autouse=True)
def long_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets digests live long, because a busy machine renews them late."""
    monkeypatch.setattr(digests, "_LIFE_MS", LIFE_MS)


@pytest.fixture
async def following(url: str) -> AsyncIterator[Next]:
    """Connected reader; returns its next event."""
    async with reading(url) as following:
        assert await following() == Connected()
        yield following


class Peer:
    """Router with a request in flight, which sends digests."""

    def __init__(self, redis: Redis) -> None:
        self.fleet = fleet_of(ManualClock(), A10)
        self.fleet.dispatch(replica(1), chat(100))
        self.push = partial(send_digest, redis, Keys("test"))

    async def send(self) -> bytes:
        self.fleet.digests.repeat()
        digest = self.fleet.digests.due(0.0)
        assert digest is not None
        await self.push(digest)
        return DIGEST.seal(digest)


@pytest.fixture
def peer(redis_client: Redis) -> Peer:
    return Peer(redis_client)


async def heard(following: Next) -> Digest:
    event = await following()
    assert isinstance(event, DigestReceived)
    return event.digest


async def test_digest_reader_gets_present_and_later_digests(
    url: str, redis_client: Redis, peer: Peer
) -> None:
    key = Keys("test").router + peer.fleet.router
    began = monotonic()
    first = await peer.send()
    assert 0 < await redis_client.pttl(key) <= LIFE_MS
    async with reading(url) as following:
        assert await following() == Connected()
        found = await following()
        assert isinstance(found, DigestReceived)
        assert DIGEST.seal(found.digest) == first
        assert 0 <= found.age <= monotonic() - began + 0.01
        second = await peer.send()
        assert DIGEST.seal(await heard(following)) == second
        await peer.push(last := peer.fleet.digests.farewell())
        assert DIGEST.seal(await heard(following)) == DIGEST.seal(last)
        assert not await redis_client.exists(key)


async def test_living_routers_are_found_by_name(redis_client: Redis, peer: Peer) -> None:
    assert await living_routers(redis_client, "test") == {}
    peer.fleet.digests.admin = "10.0.0.1:9090"
    await peer.send()
    await redis_client.set(Keys("test").router + "garbage", b"\x63 a later version")
    assert await living_routers(redis_client, "test") == {peer.fleet.router: "10.0.0.1:9090"}
    assert await living_routers(redis_client, "other") == {}
    await peer.push(peer.fleet.digests.farewell())
    assert await living_routers(redis_client, "test") == {}


async def test_garbage_digest_is_skipped_with_one_line(
    url: str, redis_client: Redis, peer: Peer, logged: Logged
) -> None:
    keys = Keys("test")
    await redis_client.set(keys.router + "garbage", b"\x63 a later version")
    await redis_client.hset(keys.router + "hash", "field", "value")
    async with reading(url) as following:
        assert await following() == Connected()
        for _ in range(3):
            await redis_client.publish(keys.digests, b"\x63 a later version")
            await redis_client.publish(keys.digests, b"\x01 and what is none")
        sent = await peer.send()
        assert DIGEST.seal(await heard(following)) == sent
    assert [first["source"] for first in logged.lines()] == [keys.router + "garbage", keys.digests]


async def test_full_redis_sends_digests(redis_client: Redis, following: Next, peer: Peer) -> None:
    await redis_client.config_set("maxmemory", 1)
    sent = await peer.send()
    assert DIGEST.seal(await heard(following)) == sent
    assert await redis_client.dbsize() == 0


async def test_digest_reader_works_without_pttl_permission(
    redis_server: RedisServer, redis_client: Redis, peer: Peer
) -> None:
    await peer.send()
    rights = ("on", "nopass", "~*", "&*", "+@all", "-pttl")
    await command(redis_client, "ACL", "SETUSER", "reader", *rights)
    async with reading(f"redis://reader:any@127.0.0.1:{redis_server.port}") as following:
        assert await following() == Connected()
        sent = await peer.send()
        assert DIGEST.seal(await heard(following)) == sent


async def test_routers_count_requests_of_live_peers(redis_server: RedisServer) -> None:
    registry = CollectorRegistry()
    async with router(redis_server.url) as second:
        async with router(redis_server.url, registry) as first:
            first.dispatch(replica(1), chat(100))
            await _sees(second, 1)
            await until(lambda: bool(registry.get_sample_value("extproc_redis_seconds_count")))
            await redis_server.kill()
            await _sees(second, 0)
            await until(lambda: len(second.view(MODEL)) and second.peers.stale)
            await redis_server.start()
            await _sees(second, 1)
        await until(lambda: len(second.peers) == 0)
        await _sees(second, 0)


async def test_messages_of_later_versions_are_counted(url: str, redis_client: Redis) -> None:
    registry = CollectorRegistry()
    future = msgpack.encode(["new", 1, []])
    await redis_client.set(Keys("test").router + "later", future)
    await redis_client.xadd(Keys("test").responses, {"": future})
    await redis_client.rpush(Keys("test").blocks + replica(1), future)
    name, labels = "extproc_redis_skipped_total", {"reason": "unknown_tag"}
    async with router(url, registry):
        await until(lambda: registry.get_sample_value(name, labels) == 3)


async def test_router_whose_redis_is_read_only_logs_that_others_do_not_know_its_requests(
    url: str, redis_client: Redis, logged: Logged
) -> None:
    await command(redis_client, "REPLICAOF", "127.0.0.1", free_port())
    async with router(url):
        line = await logged.line(
            "redis takes no digests, retrying: other routers do not know this router's requests"
        )
    assert "no longer accepts writes" in str(line["error"])
    assert not logged.lines(LOST)


async def test_farewell_is_sent_at_stop(redis_server: RedisServer, redis_client: Redis) -> None:
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
            assert (await heard(following)).kind is DigestKind.WHOLE
            await redis_client.client_pause(300, all=False)  # all else ends long before
            process.terminate()
            while (await heard(following)).kind is not DigestKind.FAREWELL:
                pass
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()


async def _sees(fleet: Fleet, requests: int) -> None:
    await until(lambda: fleet.view(MODEL).requests[0] == requests)
