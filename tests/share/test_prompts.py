"""Which prompts were sent where, told through a real Redis."""

import numpy as np
import pytest
from redis.asyncio import Redis

from extproc.fleet.fleet import Fleet
from extproc.request.endpoint import Endpoint
from extproc.request.prefix import UNIT_BYTES, Prefix, prefix_of
from extproc.request.profile import RequestProfile
from extproc.share.connection import Keys, connect
from extproc.share.streams import PROMPTS, Prompts
from tests.conftest import RedisServer
from tests.fakes import MODEL, replica
from tests.share.routers import router
from tests.share.servers import command
from tests.share.test_bounds import ACL
from tests.waiting import until

pytestmark = pytest.mark.process


def prompt(letter: str, units: int) -> Prefix:
    return prefix_of(letter.encode() * UNIT_BYTES * units, b"", b"", units * 64, 1)


def send(fleet: Fleet, number: int, prefix: Prefix) -> None:
    tokens = round(len(prefix.keys) * prefix.unit)
    profile = RequestProfile(Endpoint.CHAT, MODEL, tokens, 0, 100, prefix=prefix)
    fleet.dispatch(replica(number), profile)


async def holds(fleet: Fleet, number: int, prefix: Prefix) -> None:
    """Only that replica does."""

    def it_does() -> bool:
        held = fleet.held(prefix, fleet.view(MODEL)).expected
        whole = len(prefix.keys) * prefix.unit
        return list(held) == [whole * (number == 1), whole * (number == 2)]

    await until(it_does)


@pytest.mark.parametrize("protocol", [2, 3])
async def test_each_router_hears_and_one_that_starts_reads_what_was_sent(
    redis_server: RedisServer, redis_client: Redis, protocol: int
) -> None:
    await command(redis_client, "ACL", "SETUSER", "router", "on", ">secret", *ACL.split())
    url = f"redis://router:secret@127.0.0.1:{redis_server.port}/0?protocol={protocol}"
    async with router(url) as first:
        async with router(url) as second:
            send(first, 1, prompt("a", 30))
            send(first, 2, prompt("b", 3))
            await holds(second, 1, prompt("a", 30))
            await holds(second, 2, prompt("b", 3))
            send(second, 2, prompt("c", 5))
            await holds(first, 2, prompt("c", 5))
        async with router(url) as third:
            for number, prefix in ((1, prompt("a", 30)), (2, prompt("b", 3)), (2, prompt("c", 5))):
                await holds(third, number, prefix)
    assert await command(redis_client, "ACL", "LOG") == []


async def test_what_was_sent_while_redis_was_away_is_told_when_it_is_back(
    redis_server: RedisServer,
) -> None:
    async with router(redis_server.url) as first, router(redis_server.url) as second:
        send(first, 1, prompt("a", 3))
        await holds(second, 1, prompt("a", 3))
        await redis_server.kill()
        send(first, 2, prompt("b", 3))
        await redis_server.start()
        await holds(second, 2, prompt("b", 3))
        assert fleet_holds(second, prompt("a", 3))


def fleet_holds(fleet: Fleet, prefix: Prefix) -> bool:
    return bool(np.any(fleet.held(prefix, fleet.view(MODEL)).expected))


async def test_garbage_is_harmless(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        router(redis_server.url) as first,
        router(redis_server.url) as second,
        connect(redis_server.url, "test") as client,
    ):
        for garbage in (b"\xff" * 40, b"", b"\x00", b"\x01\x00" + b"\x00" * 16 + b"\xff"):
            await client.xadd(Keys("test").prompts, {"": garbage})
            sealed = PROMPTS.seal(Prompts("another", garbage))
            await client.xadd(Keys("test").prompts, {"": sealed})
        send(first, 1, prompt("a", 3))
        await holds(second, 1, prompt("a", 3))
    assert [one.message for one in caplog.records].count("skipped garbage in redis") <= 2
