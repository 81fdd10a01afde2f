"""Sessions stay with one replica, whichever router is asked."""

import asyncio

import pytest
import pytest_asyncio

from tests.e2e.client import Answer, Client
from tests.e2e.stack import Stack
from tests.e2e.systems import Routers
from tests.e2e.test_membership import replicas
from tests.waiting import until, until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

REPLICAS = Routers.FLEET
TIMES = 6  # by chance it is the right one of four replicas so often in one of 4,096 cases
TURNS = 24  # by chance Envoy asks only one of two routers so often in one of eight million cases


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(routers: Stack) -> Stack:
    return routers


def server_of(answer: Answer) -> str:
    assert answer.status == 200
    return answer.headers["x-served-by"]


async def short(client: Client, headers: dict[str, str]) -> Answer:
    """A chat known to be short: it costs as good as the same on replicas measured otherwise."""
    return await client.chat(headers=headers, max_tokens=8)


async def stays(client: Client, headers: dict[str, str]) -> str:
    served: list[str] = []

    async def so() -> bool:
        before = await client.routed_by_each()
        served[:] = [server_of(await short(client, headers)) for _ in range(TIMES)]
        after = await client.routed_by_each()
        asked = all(now > then for now, then in zip(after, before, strict=True))
        return asked and len(set(served)) == 1

    await until(so)
    return served[0]


@pytest.mark.parametrize("named", [{"x-session-id": "a"}, {"cookie": "x=y; sid=b"}])
async def test_a_session_stays_where_it_is(client: Client, named: dict[str, str]) -> None:
    home = await stays(client, named)
    before = await client.routed_by_each()
    again = [await short(client, named) for _ in range(TURNS)]
    after = await client.routed_by_each()
    assert {server_of(answer) for answer in again} == {home}
    assert all(now > then for now, then in zip(after, before, strict=True))


async def test_sessions_and_requests_without_one_are_spread(client: Client) -> None:
    """Of sixteen one of the two routers gets eight, and with them each replica has its turn."""
    without = [client.chat() for _ in range(16)]
    answers = await asyncio.gather(*without)
    assert len({server_of(answer) for answer in answers}) == len(REPLICAS)
    new = [client.chat(headers={"x-session-id": f"new-{number}"}) for number in range(16)]
    answers = await asyncio.gather(*new)
    assert len({server_of(answer) for answer in answers}) == len(REPLICAS)


async def test_restarted_router_knows_where_sessions_are(client: Client, stack: Stack) -> None:
    named = {"x-session-id": "restart"}
    home = await stays(client, named)
    for router in stack.routers:
        await stack.kill(router)
        await stack.start(router)
    await stack.wait_routing()
    assert await stays(client, named) == home


async def test_to_stay_costs_so_much_and_no_more(client: Client) -> None:
    """Each of these prompts takes a replica 0.1 s: after a handful another one is better."""
    named = {"x-session-id": "busy"}
    await stays(client, named)
    await client.slow(20.0)  # none ends while others come
    prompts = [[{"role": "user", "content": f"{number}: " * 6_000}] for number in range(30)]
    asked = [
        asyncio.create_task(client.chat(headers=named, tokens=2, messages=prompt))
        for prompt in prompts
    ]

    async def all_came() -> bool:
        return sum([await client.load(one.name) for one in REPLICAS]) == len(prompts)

    await until(all_came)
    await client.slow(1.0)
    answers = await asyncio.gather(*asked)
    assert len({server_of(answer) for answer in answers}) > 1
    await client.ledger_empty()
    await stays(client, named)


async def test_session_leaves_draining_and_dead_replicas(client: Client, stack: Stack) -> None:
    named = {"x-session-id": "leaves"}
    home = await stays(client, named)
    assert await replicas(stack, "drain", home) == 0
    await until_read(lambda: client.replica(stack.name_of(home)), lambda now: now["draining"])
    second = await stays(client, named)
    assert second != home
    assert await replicas(stack, "undrain", home) == 0
    await stack.kill(stack.name_of(second))
    await until_read(lambda: client.replica(stack.name_of(second)), lambda now: not now["healthy"])
    assert await stays(client, named) != second
    await stack.start(stack.name_of(second))
    await stack.wait_routing()
