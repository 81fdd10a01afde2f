"""Which prompts were sent where, told through a real Redis."""

import numpy as np
import pytest
from redis.asyncio import Redis

from extproc.fleet.fleet import Fleet
from extproc.request.endpoint import Endpoint
from extproc.request.prefix import UNIT_BYTES, Prefix, prefix_of
from extproc.request.profile import RequestProfile
from extproc.share.connection import Keys
from extproc.share.streams import PROMPTS, Prompts
from tests.conftest import RedisServer
from tests.fakes import MODEL, replica
from tests.share.conftest import Pair, router
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
async def test_prompts_reach_present_and_later_routers(limited_url: str, protocol: int) -> None:
    url = f"{limited_url}/0?protocol={protocol}"
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


async def test_prompts_sent_during_outage_are_told_later(
    redis_server: RedisServer, routers: Pair
) -> None:
    first, second = routers
    send(first, 1, prompt("a", 3))
    await holds(second, 1, prompt("a", 3))
    await redis_server.kill()
    send(first, 2, prompt("b", 3))
    await redis_server.start()
    await holds(second, 2, prompt("b", 3))
    assert np.any(second.held(prompt("a", 3), second.view(MODEL)).expected)


async def test_garbage_prompts_are_skipped(
    redis_client: Redis, routers: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = routers
    for garbage in (b"\xff" * 40, b"", b"\x00", b"\x01\x00" + b"\x00" * 16 + b"\xff"):
        await redis_client.xadd(Keys("test").prompts, {"": garbage})
        sealed = PROMPTS.seal(Prompts("another", garbage))
        await redis_client.xadd(Keys("test").prompts, {"": sealed})
    send(first, 1, prompt("a", 3))
    await holds(second, 1, prompt("a", 3))
    assert [one.message for one in caplog.records].count("skipped garbage in redis") <= 2
