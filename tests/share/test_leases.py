"""Who holds what, in a real Redis."""

import asyncio
from collections import Counter
from collections.abc import Collection

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.utils import str_if_bytes

from extproc.replica_state import ReplicaState
from extproc.share import leases
from extproc.share.connection import Keys, connect, outage
from extproc.share.leases import Held, Leases, living
from extproc.share.replicas import StateWriter
from tests.conftest import Logged, RedisServer
from tests.fakes import ManualClock
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

POOL = "test"
TEN = [f"10.0.0.{number}:8000" for number in range(10)]
LIFE_S = 60.0


@pytest.fixture(autouse=True)
def long_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease ends because this machine is busy."""
    monkeypatch.setattr(leases, "LIFE_S", LIFE_S)


def poller(redis: Redis, name: str, clock: ManualClock | None = None) -> Leases:
    return Leases(redis, POOL, name, outage(redis), clock or ManualClock())


async def owners(redis: Redis, replicas: Collection[str] = TEN) -> list[str | None]:
    values = await redis.mget([Keys(POOL).lease + replica for replica in replicas])
    return [None if value is None else str_if_bytes(value) for value in values]


async def rounds(*pollers: Leases, count: int = 2) -> None:
    for _ in range(count):
        for each in pollers:
            await each.tend(TEN)


async def test_single_poller_leases_all_replicas(redis_client: Redis) -> None:
    held = await poller(redis_client, "a").tend(TEN)
    assert held.replicas == held.taken == set(TEN)
    assert await owners(redis_client) == ["a"] * 10
    for key in (Keys(POOL).lease + TEN[0], Keys(POOL).pollers):
        assert 0 < await redis_client.pttl(key) <= LIFE_S * 1000


async def test_lease_is_renewed_by_owner_only(redis_client: Redis) -> None:
    a = poller(redis_client, "a")
    await a.tend(TEN)
    lost, kept = Keys(POOL).lease + TEN[0], Keys(POOL).lease + TEN[1]
    await redis_client.set(lost, "b", px=30_000)
    await redis_client.pexpire(kept, 30_000)
    held = await a.tend(TEN)
    assert held == Held(frozenset(TEN[1:]))
    assert await redis_client.get(lost) == b"b"
    assert await redis_client.pttl(lost) <= 30_000 < await redis_client.pttl(kept)
    await a.release()
    assert await owners(redis_client) == ["b"] + [None] * 9
    assert await redis_client.keys() == [lost.encode()]


@pytest.mark.parametrize("pollers", [2, 3, 4, 7, 13])
async def test_leases_stay_balanced_across_pollers(redis_client: Redis, pollers: int) -> None:
    names = [str(number) for number in range(pollers)]
    each = {name: poller(redis_client, name) for name in names}
    for joined in range(1, pollers + 1):
        await rounds(*list(each.values())[:joined])
    balanced = await owners(redis_client)
    assert max(Counter(balanced).values()) == -(-10 // pollers)
    await rounds(*each.values())
    assert await owners(redis_client) == balanced
    await each.pop("0").release()
    await rounds(*each.values())
    assert max(Counter(await owners(redis_client)).values()) == -(-10 // (pollers - 1))
    assert set(await owners(redis_client)) <= each.keys()


async def test_lease_passes_over_without_gap(redis_client: Redis) -> None:
    a, b = poller(redis_client, "a"), poller(redis_client, "b")
    await a.tend(TEN)
    assert len((await b.tend(TEN)).taken) == 5
    assert None not in await owners(redis_client)
    assert len((await a.tend(TEN)).replicas) == 5


async def test_leases_of_dead_poller_are_taken(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = poller(redis_client, "a"), poller(redis_client, "b")
    await rounds(a, b)
    with monkeypatch.context() as soon:
        soon.setattr(leases, "LIFE_S", 0.1)
        await a.tend(TEN)
    async with asyncio.timeout(PATIENCE_S):
        while (await b.tend(TEN)).replicas != set(TEN):  # a never comes again
            pass


async def test_state_under_lost_lease_is_not_written(redis_client: Redis) -> None:
    a, b = poller(redis_client, "a"), poller(redis_client, "b")
    mine, lost = TEN[:2]
    await rounds(a)
    await redis_client.set(Keys(POOL).lease + lost, "b")
    async with redis_client.pubsub() as pushed:
        await pushed.psubscribe("*")
        writer = StateWriter(redis_client, POOL, ttl_s=60, poller="a")
        await writer.put([ReplicaState(id=lost), ReplicaState(id=mine)])
        message = await pushed.get_message(timeout=PATIENCE_S)
        message = await pushed.get_message(timeout=PATIENCE_S)
        assert message is not None
        assert mine.encode() in message["data"]
        assert lost.encode() not in message["data"]
    assert await redis_client.exists(Keys(POOL).replica + mine)
    assert not await redis_client.exists(Keys(POOL).replica + lost)
    await rounds(b)


async def test_leases_take_one_round_trip(redis_client: Redis) -> None:
    many = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(1000)]
    a, b = poller(redis_client, "a"), poller(redis_client, "b")
    await a.tend(many)
    await redis_client.config_resetstat()
    assert len((await a.tend(many)).replicas) == 1000
    assert len((await b.tend(many)).replicas) == 500
    stats = await redis_client.info("commandstats")
    assert stats["cmdstat_eval"]["calls"] == 2


async def test_pollers_reclaim_own_leases_after_restart(
    redis_server: RedisServer, logged: Logged
) -> None:
    clock = ManualClock()
    async with connect(redis_server.url, POOL) as redis:
        a, b = poller(redis, "a", clock), poller(redis, "b", clock)
        await rounds(a, b)
        before = await owners(redis)
        await redis_server.kill()
        own = {name for name, owner in zip(TEN, before, strict=True) if owner == "a"}
        assert (await a.tend(TEN)).replicas == own
        await b.tend(TEN)
        await redis_server.start()
        held = await a.tend(TEN)
        assert held.replicas == held.reclaimed == own  # not what b held, though nobody holds it now
        await a.tend(TEN)
        await b.tend(TEN)
        assert await owners(redis) == before
        await b.release()  # and what is left over is taken in the end
        clock.advance(LIFE_S)
        assert (await a.tend(TEN)).replicas == set(TEN)


async def test_expired_leases_are_not_reclaimed_at_once(
    redis_client: Redis,
) -> None:
    clock = ManualClock()
    a, b = poller(redis_client, "a", clock), poller(redis_client, "b", clock)
    await a.tend(TEN)
    await redis_client.flushdb()  # the life of all is over
    await rounds(b)
    assert await a.tend(TEN) == Held(frozenset())
    clock.advance(LIFE_S)
    assert len((await a.tend(TEN)).taken) == 5


async def test_living_pollers_are_listed(redis_server: RedisServer, redis_client: Redis) -> None:
    assert await living(redis_client, POOL) == []
    a, b = poller(redis_client, "a"), poller(redis_client, "b")
    await rounds(a, b)
    assert sorted(await living(redis_client, POOL)) == ["a", "b"]
    await a.release()
    assert await living(redis_client, POOL) == ["b"]
    await redis_server.kill()
    with pytest.raises((RedisError, OSError)):
        await living(redis_client, POOL)
