"""Living pollers share the replicas of a pool, and each replica has a single poller."""

import asyncio
from collections.abc import Collection, Mapping

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from extproc.share import assignment
from extproc.share.assignment import Assigner, Assignment, Heartbeat, known_pollers
from extproc.share.connection import Keys, connect
from extproc.share.envelope import Skips
from tests.conftest import Logged, RedisServer
from tests.fakes import ManualClock
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

POOL = "test"
TEN = frozenset(f"10.0.0.{number}:8000" for number in range(10))
LIFE_S = 60.0


@pytest.fixture(autouse=True)
def long_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets heartbeats live long, because a busy machine renews them late."""
    monkeypatch.setattr(assignment, "LIFE_S", LIFE_S)


class AssignedPoller:
    def __init__(
        self,
        redis: Redis,
        name: str,
        listed: Collection[str] = TEN,
        clock: ManualClock | None = None,
    ) -> None:
        self.name = name
        self.listed = listed
        self.assignment = Assignment(frozenset())
        self.assigner = Assigner(redis, POOL, name, clock or ManualClock())

    @property
    def replicas(self) -> frozenset[str]:
        return self.assignment.replicas

    async def beat(self) -> Assignment:
        self.assignment = await self.assigner.beat(self.listed)
        return self.assignment


async def beats(*pollers: AssignedPoller, rounds: int = 2) -> dict[str, AssignedPoller]:
    for _ in range(rounds):
        for each in pollers:
            await each.beat()
    has = {replica: each for each in pollers for replica in each.replicas}
    assert len(has) == sum(len(each.replicas) for each in pollers), "two have replica"
    return has


async def test_single_poller_has_all_replicas(redis_client: Redis) -> None:
    assert await AssignedPoller(redis_client, "a").beat() == Assignment(TEN)
    for key in (Keys(POOL).poller + "a", Keys(POOL).pollers):
        assert 0 < await redis_client.pttl(key) <= LIFE_S * 1000


@pytest.mark.parametrize("count", [2, 7])
async def test_poller_that_comes_or_goes_moves_its_own(redis_client: Redis, count: int) -> None:
    pollers = [AssignedPoller(redis_client, str(number)) for number in range(count)]
    before = await beats(pollers[0])
    for joined in range(2, count + 1):
        now = await beats(*pollers[:joined])
        newcomer = pollers[joined - 1]
        assert {replica for replica in TEN if now[replica] != before[replica]} == newcomer.replicas
        before = now
    assert before.keys() == TEN
    gone = pollers.pop(0)
    await gone.assigner.release()
    now = await beats(*pollers)
    assert now.keys() == TEN
    assert {replica for replica in TEN if now[replica] != before[replica]} == gone.replicas


async def test_many_replicas_are_shared_about_equally(redis_client: Redis) -> None:
    many = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(1000)]
    pollers = [AssignedPoller(redis_client, name, many) for name in "abcd"]
    await beats(*pollers)
    assert all(200 <= len(each.replicas) <= 300 for each in pollers)


async def test_new_poller_takes_over_replicas_at_its_second_heartbeat(redis_client: Redis) -> None:
    eleven = {*TEN, "10.0.1.1:8000"}
    a, b = AssignedPoller(redis_client, "a"), AssignedPoller(redis_client, "b", eleven)
    await a.beat()
    assert (await b.beat()).replicas == {"10.0.1.1:8000"}
    left = (await a.beat()).replicas
    assert (await b.beat()).replicas == eleven - left


async def test_replicas_of_dead_poller_are_taken_over(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = AssignedPoller(redis_client, "a"), AssignedPoller(redis_client, "b")
    await beats(a, b)
    assert b.replicas < TEN
    with monkeypatch.context() as soon:
        soon.setattr(assignment, "LIFE_S", 0.1)
        await a.beat()
    async with asyncio.timeout(PATIENCE_S):
        while b.replicas != TEN:  # a never comes again
            await b.beat()
    await b.beat()
    assert await redis_client.smembers(Keys(POOL).pollers) == {b"b"}


@pytest.mark.parametrize("outage", [False, True])
async def test_poller_whose_heartbeat_expired_starts_as_a_new_one(
    redis_server: RedisServer, redis_client: Redis, outage: bool
) -> None:
    clock = ManualClock()
    async with connect(redis_server.url, POOL) as redis:
        a, b = AssignedPoller(redis, "a", clock=clock), AssignedPoller(redis, "b")
        before = await beats(a, b)
        clock.advance(LIFE_S)
        assert not a.assigner.lapsed
        clock.advance(1)
        assert a.assigner.lapsed  # at once, before any heartbeat
        if outage:
            await redis_server.kill()
            await a.beat()
            assert a.assigner.lapsed
            await redis_server.start()
        await redis_client.delete(Keys(POOL).poller + "a")
        await b.beat()
        assert await a.beat() == Assignment(frozenset(), listed_by_others=TEN, lapsed=True)
        assert not a.assigner.lapsed
        assert await beats(b, a, rounds=1) == before
        assert not a.assignment.lapsed


async def test_single_poller_whose_heartbeat_expired_keeps_its_replicas(
    redis_client: Redis,
) -> None:
    clock = ManualClock()
    a = AssignedPoller(redis_client, "a", clock=clock)
    await a.beat()
    clock.advance(LIFE_S + 1)
    await redis_client.delete(Keys(POOL).poller + "a")
    assert a.assigner.lapsed
    assert await a.beat() == Assignment(TEN)
    assert not a.assigner.lapsed


@pytest.mark.parametrize("answered", [True, False])
async def test_pause_during_a_heartbeat_does_not_renew_it(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    clock = ManualClock()
    a, b = AssignedPoller(redis_client, "a", clock=clock), AssignedPoller(redis_client, "b")
    await a.beat()
    send = a.assigner._exchange

    async def pause(beat: Heartbeat) -> tuple[bool, dict[str, frozenset[str]]]:
        answer = await send(beat)
        clock.advance(LIFE_S + 1)
        if not answered:
            raise RedisError("no answer within 1 s")
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(a.assigner, "_exchange", pause)
        await a.beat()
    assert a.assigner.lapsed
    await redis_client.delete(Keys(POOL).poller + "a")
    assert (await b.beat()).replicas == TEN
    assert (await a.beat()).lapsed
    assert not a.assigner.lapsed


async def test_pollers_keep_replicas_when_redis_comes_back_empty(
    redis_server: RedisServer, logged: Logged
) -> None:
    clock = ManualClock()
    async with connect(redis_server.url, POOL) as redis:
        a, b = (AssignedPoller(redis, name, clock=clock) for name in "ab")
        before = await beats(a, b)
        await redis_server.kill()
        assert await beats(a, b) == before
        await redis_server.start()
        part = await a.beat()
        assert part.redis_was_emptied
        assert part.replicas == {replica for replica, each in before.items() if each is a}
        assert await beats(a, b) == before
        assert not a.assignment.redis_was_emptied
        await b.assigner.release()
        clock.advance(LIFE_S)
        assert (await a.beat()).replicas == TEN


async def test_poller_that_starts_without_redis_has_nothing(stopped_redis: RedisServer) -> None:
    async with connect(stopped_redis.url, POOL) as redis:
        assert await AssignedPoller(redis, "a").beat() == Assignment(frozenset())


async def test_full_redis_keeps_pollers_and_takes_no_newcomer(redis_client: Redis) -> None:
    a, b = AssignedPoller(redis_client, "a"), AssignedPoller(redis_client, "b")
    await beats(a)
    await redis_client.config_set("maxmemory", 1)
    await redis_client.pexpire(Keys(POOL).poller + "a", 30_000)
    assert await beats(a, b) == dict.fromkeys(TEN, a)
    assert await redis_client.pttl(Keys(POOL).poller + "a") > 30_000
    await redis_client.config_set("maxmemory", 0)
    assert len({each.name for each in (await beats(a, b)).values()}) == 2


async def test_pollers_are_listed_by_host_and_port(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    async def listed() -> tuple[Mapping[str, Heartbeat], Collection[str]]:
        return await known_pollers(redis_client, POOL, Skips())

    assert await listed() == ({}, set())
    a, b = AssignedPoller(redis_client, "host:1:0a"), AssignedPoller(redis_client, "host:2:0b")
    await beats(a, b)
    await redis_client.sadd(Keys(POOL).pollers, "dead:1:0c")
    alive, stopped = await listed()
    assert {name: {*beat.replicas} for name, beat in alive.items()} == dict.fromkeys(
        ("host:1", "host:2"), TEN
    )
    assert not stopped
    await a.assigner.release()
    await b.assigner.beat(["a:1"], ["vllm: no name server answers"])
    beat = Heartbeat(("a:1",), ("vllm: no name server answers",))
    assert await listed() == ({"host:2": beat}, {"host:1:0a"})
    await beats(AssignedPoller(redis_client, "host:1:0d"))
    alive, _ = await listed()
    assert alive.keys() == {"host:1", "host:2"}
    await redis_server.kill()
    with pytest.raises((RedisError, OSError)):
        await listed()


async def test_farewell_of_the_last_poller_is_listed_for_some_seconds(redis_client: Redis) -> None:
    last = AssignedPoller(redis_client, "host:1:0a")
    await beats(last)
    await last.assigner.release()
    assert await known_pollers(redis_client, POOL, Skips()) == ({}, {"host:1:0a"})
    for key in (Keys(POOL).poller + last.name, Keys(POOL).pollers):
        assert 2_000 < await redis_client.pttl(key) <= 5_000


async def test_poller_whose_heartbeat_is_unreadable_may_have_replicas(redis_client: Redis) -> None:
    """A router that knows no replica must not take the pool for an empty one."""
    await redis_client.sadd(Keys(POOL).pollers, "host:1:0a")
    await redis_client.set(Keys(POOL).poller + "host:1:0a", b"\x63 a later version")
    alive, _ = await known_pollers(redis_client, POOL, Skips())
    assert alive["host:1"].problems
