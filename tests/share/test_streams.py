"""Streams in Redis: owners and prompts reach present and later routers."""

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from extproc.fleet.announcements import SentPrompt
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import wall
from extproc.proxy import sharing as shared
from extproc.request.endpoint import Endpoint
from extproc.request.prefix import UNIT_BYTES, Prefix, prefix_of
from extproc.request.profile import RequestProfile
from extproc.share import assignment
from extproc.share.assignment import Assigner
from extproc.share.connection import Keys, connect
from extproc.share.replicas import StateWriter
from extproc.share.streams import OWNER, PROMPTS, Owner, Prompts, StreamReader, append
from tests.conftest import Logged, RedisServer
from tests.fakes import MODEL, ManualClock, replica, state
from tests.share.conftest import Pair, hearing, router
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

FIRST, SECOND = Owner("resp_1", replica(2)), Owner("resp_2", replica(2))


@pytest.fixture(params=[2, 3])
def protocol_url(limited_url: str, request: pytest.FixtureRequest) -> str:
    """The address of a user with few rights, for each version of Redis's protocol."""
    return f"{limited_url}/0?protocol={request.param}"


async def knows(fleet: Fleet, *names: str) -> None:
    await until(lambda: all(fleet.response_owner(name) == replica(2) for name in names))


def prompt(letter: str, units: int) -> Prefix:
    return prefix_of(letter.encode() * UNIT_BYTES * units, units * 64, 1)


def send(fleet: Fleet, number: int, prefix: Prefix) -> None:
    tokens = round(len(prefix.keys) * prefix.unit)
    profile = RequestProfile(Endpoint.CHAT, MODEL, tokens, 0, 100, prefix=prefix)
    fleet.dispatch(replica(number), profile)


async def holds(fleet: Fleet, number: int, prefix: Prefix) -> None:
    def it_does() -> bool:
        held = fleet.prefix_hits(prefix, fleet.view(MODEL)).expected
        whole = len(prefix.keys) * prefix.unit
        return list(held) == [whole * (number == 1), whole * (number == 2)]

    await until(it_does)


async def test_owners_and_prompts_reach_present_and_new_routers(
    protocol_url: str, redis_client: Redis
) -> None:
    names = [f"resp_{number}" for number in range(250)]
    async with router(protocol_url) as first:
        async with router(protocol_url) as second:
            for name in names[:200]:
                first.responses.record(name, replica(2))
            send(first, 1, prompt("a", 30))
            send(first, 2, prompt("b", 3))
            await knows(second, *names[:200])
            await holds(second, 1, prompt("a", 30))
            await holds(second, 2, prompt("b", 3))
            for name in names[200:]:
                second.responses.record(name, replica(2))
            send(second, 2, prompt("c", 5))
            await knows(first, *names[200:])
            await holds(first, 2, prompt("c", 5))
        async with router(protocol_url) as third:
            await knows(third, *names)
            for number, prefix in ((1, prompt("a", 30)), (2, prompt("b", 3)), (2, prompt("c", 5))):
                await holds(third, number, prefix)
    assert 0 < await redis_client.ttl(Keys("test").responses) <= 86_400


async def test_new_router_awaits_the_state_of_each_listed_replica(
    url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, the router would drop prompts sent there, and answer 404 to its models."""
    monkeypatch.setattr(assignment, "LIFE_S", PATIENCE_S)
    poller = Assigner(redis_client, "test", "host:1:0a", ManualClock())
    async with router(url) as first:
        send(first, 2, prompt("a", 3))
        await until(lambda: redis_client.exists(Keys("test").prompts))
        writer = StateWriter(redis_client, "test", PATIENCE_S)
        await writer.put([state(1, "llama-8b-a10", ManualClock(wall()))])
        async with router(url, members=0) as second:
            await until(lambda: len(second.members) == 1 and second.pollers == {})
            await poller.beat([replica(1), replica(2)])
            await until(lambda: bool(second.pollers))
            assert not second.members_known.is_set()
            await writer.put([state(2, "llama-8b-a10", ManualClock(wall()))])
            await holds(second, 2, prompt("a", 3))
            assert second.members_known.is_set()


async def test_owners_and_prompts_are_announced_after_outage(
    redis_server: RedisServer, routers: Pair
) -> None:
    first, second = routers
    first.responses.record("resp_before", replica(2))
    send(first, 1, prompt("a", 3))
    await knows(second, "resp_before")
    await holds(second, 1, prompt("a", 3))
    await redis_server.kill()
    for name in ("resp_1", "resp_2"):
        first.responses.record(name, replica(2))
        assert first.response_owner(name) == replica(2)
        await asyncio.sleep(0)
    send(first, 2, prompt("b", 3))
    await redis_server.start()  # empty
    await knows(second, "resp_before", "resp_1", "resp_2")
    await holds(second, 2, prompt("b", 3))
    assert np.any(second.prefix_hits(prompt("a", 3), second.view(MODEL)).expected)


async def test_redis_bounds_response_owners(
    url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "MAX_OWNERS", 200)
    async with router(url) as first, router(url) as second:
        for number in range(1_000):
            first.responses.record(f"resp_{number}", replica(2))
        await knows(second, "resp_999")
    stored = await redis_client.xlen(Keys("test").responses)
    assert 200 <= stored <= 400  # Redis drops whole nodes of a hundred entries


def owners_in(redis: Redis, pool: str) -> StreamReader[Owner]:
    return StreamReader(redis, Keys(pool).responses, OWNER)


reading = partial(hearing, owners_in)


async def is_reading(client: Redis) -> bool:
    return any("b" in connection["flags"] for connection in await client.client_list())


async def test_disconnected_reader_resumes(url: str, redis_client: Redis) -> None:
    send = partial(append, redis_client, Keys("test").responses, OWNER, 100)
    async with reading(url) as following:
        await send([FIRST])
        assert await following() == FIRST
        second = asyncio.ensure_future(following())
        await until(lambda: is_reading(redis_client))
        assert await redis_client.client_kill_filter(_type="normal", skipme=True)
        await send([SECOND])
        assert await second == SECOND


async def test_reader_tolerates_earlier_redis_clock(redis_server: RedisServer) -> None:
    async with reading(redis_server.url) as following:
        async with connect(redis_server.url, "test") as client:
            first: Any = {"": OWNER.seal(FIRST)}
            await client.xadd(Keys("test").responses, first, id="9999999999999-0")
            assert await following() == FIRST
            second = asyncio.ensure_future(following())
            await until(lambda: is_reading(client))
        await redis_server.kill()
        await redis_server.start()
        async with connect(redis_server.url, "test") as client:
            await append(client, Keys("test").responses, OWNER, 100, [SECOND])
            assert await second == SECOND


async def test_garbage_owners_are_skipped(url: str, redis_client: Redis, logged: Logged) -> None:
    key = Keys("test").responses
    await redis_client.set(key, "no stream")
    async with router(url) as first, router(url) as second:
        first.responses.record("resp_1", replica(2))
        assert (await logged.line("skipped garbage in redis"))["source"] == key
        await redis_client.delete(key)
        for garbage in (b"", b"\xff", b"nowhere"):
            await redis_client.xadd(key, {"": garbage})
        await redis_client.xadd(key, {b"\xff\xfe": b"\xff", "resp_x": "nowhere"})
        first.responses.record("resp_2", replica(2))
        await knows(second, "resp_1", "resp_2")
        assert second.response_owner("resp_x") is None


@pytest.mark.parametrize("unit", [5e-324, 1e308])
async def test_prompt_in_impossible_units_is_skipped(
    url: str, redis_client: Redis, unit: float
) -> None:
    """Each router reads the stream when it starts, so a failure would end all of them again."""
    bad = SentPrompt(replica(1), prompt("a", 3).keys, unit, 1.0, 0)
    bodies = [Prompts("host:1:0a", (bad, bad))]
    await append(redis_client, Keys("test").prompts, PROMPTS, 100, bodies)
    async with router(url) as first, router(url) as second:
        send(first, 1, prompt("b", 3))
        await holds(second, 1, prompt("b", 3))
