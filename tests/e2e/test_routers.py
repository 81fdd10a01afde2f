"""Two routers of one pool: sessions stay with one replica whichever router is asked, and so does
what is about a response, which vLLM keeps in the memory of one process."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from extproc.lab.harness.envoy_config import Bootstrap
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import Answer, Client
from tests.e2e.stack import Stack, ext_proc_of, replicas
from tests.proxy.envoy_side import EnvoySide
from tests.proxy.replies import destination
from tests.waiting import until, until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

REPLICAS = tuple(SimulatedReplica(f"r{number}", "llama-8b-h100") for number in range(4))
RESPONSES = "/v1/responses"
TIMES = 6  # by chance it is the right one of four replicas so often in one of 4,096 cases
TURNS = 24  # by chance Envoy asks only one of two routers so often in one of eight million cases
_AFFINITY: dict[str, dict[str, object]] = {
    "route": {
        "policy": "round_robin",
        "session_header": "x-session-id",
        "session_cookie": "sid",
        "session_cost_s": 0.5,
    },
    "serve": {"chunks_per_s": 0.0, "drain_s": 1.0},
}


class Routers(Stack):
    """Two routers and four equal replicas in turn; Envoy tells the routers the headers that name
    sessions."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, REPLICAS, _AFFINITY, routers=2)

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        told = ["request.headers['x-session-id']", "request.headers['cookie']"]
        ext_proc_of(bootstrap)["request_attributes"] += told
        return bootstrap


def system(directory: Path) -> Stack:
    return Routers(directory)


async def routers_restart(stack: Stack) -> None:
    for router in stack.routers:
        await stack.kill(router)
        await stack.start(router)
    await stack.wait_routing()


@asynccontextmanager
async def both_routers_asked(client: Client) -> AsyncIterator[None]:
    before = await client.routed_by_each()
    yield
    after = await client.routed_by_each()
    assert all(now > then for now, then in zip(after, before, strict=True))


def server_of(answer: Answer) -> str:
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
async def test_session_stays_where_it_is(client: Client, named: dict[str, str]) -> None:
    home = await stays(client, named)
    async with both_routers_asked(client):
        again = [await short(client, named) for _ in range(TURNS)]
    assert {server_of(answer) for answer in again} == {home}


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
    await routers_restart(stack)
    assert await stays(client, named) == home


async def test_busy_session_leaves_when_waiting_costs_more(client: Client) -> None:
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


async def respond(client: Client, tokens: int = 8, **fields: Any) -> Answer:
    body = {"model": MODEL, "input": "Tell me of the sea."} | fields
    wanted = {"x-simulate-output-tokens": str(tokens)}
    return await client.request("POST", RESPONSES, body, wanted)


def id_of(answer: Answer) -> str:
    assert answer.status == 200
    if answer.headers["Content-Type"].startswith("text/event-stream"):
        data = answer.body.partition(b"data: ")[2].partition(b"\n")[0]
        return str(json.loads(data)["response"]["id"])
    return str(json.loads(answer.body)["id"])


async def known(client: Client, answer: Answer) -> None:
    """Returns when every router knows who holds it, for the one that did not see it is told; and
    whichever Envoy asks, what is about it goes there."""
    stack, path = client._stack, f"{RESPONSES}/{id_of(answer)}"

    async def held_by(router: str) -> str:
        async with (
            grpc.aio.insecure_channel(stack.address(router)) as channel,
            EnvoySide(channel).stream() as stream,
        ):
            reply = await stream.request_headers(path, "GET", end_of_stream=True)
            return next(iter(destination(reply)), "")  # none: the router does not know it yet

    async def held() -> bool:
        return {await held_by(router) for router in stack.routers} == {server_of(answer)}

    await until(held)
    for _ in range(TIMES):
        asked = await client.request("GET", path)
        assert (asked.status, server_of(asked)) == (200, server_of(answer))
        assert asked.decisions == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_conversation_goes_on_where_it_is_held(client: Client, streamed: bool) -> None:
    async with both_routers_asked(client):
        last = await respond(client, stream=streamed)
        holder = server_of(last)
        for _ in range(TURNS):
            await known(client, last)
            last = await respond(client, stream=streamed, previous_response_id=id_of(last))
            assert (last.status, server_of(last)) == (200, holder)


async def test_retry_stays_where_the_conversation_is_held(client: Client, stack: Stack) -> None:
    """Any other replica would answer 404, which nobody tries again."""
    last = await respond(client)
    await known(client, last)
    holder = stack.name_of(server_of(last))
    await client.simulate(holder, fail=503)
    try:
        answer = await respond(client, previous_response_id=id_of(last))
    finally:
        await client.simulate(holder, fail=0)
    assert answer.status == 503


async def test_background_response_is_polled_and_cancelled_at_its_owner(client: Client) -> None:
    queued = await respond(client, tokens=5_000, background=True)
    assert json.loads(queued.body)["status"] == "queued"
    await known(client, queued)
    cancelled = await client.request("POST", f"{RESPONSES}/{id_of(queued)}/cancel")
    assert (cancelled.status, server_of(cancelled)) == (200, server_of(queued))
    assert json.loads(cancelled.body)["status"] == "cancelled"
    await client.ledger_empty()


async def test_unknown_response_is_not_found(client: Client) -> None:
    assert (await client.request("GET", f"{RESPONSES}/resp_unknown")).status == 404
    answer = await respond(client, previous_response_id="resp_unknown")
    assert answer.status == 404


async def test_new_conversations_are_spread(client: Client) -> None:
    answers = await asyncio.gather(*(respond(client) for _ in range(len(REPLICAS) * 4)))
    assert {server_of(answer) for answer in answers} == {
        client._stack.address(one.name) for one in REPLICAS
    }


async def test_response_after_retry_belongs_to_serving_replica(
    client: Client, stack: Stack
) -> None:
    """The one chosen first fails; Envoy takes the second choice."""
    name = REPLICAS[0].name
    await client.simulate(name, fail=503)
    served = [await respond(client) for _ in range(len(REPLICAS) * 2)]
    await client.simulate(name, fail=0)
    retried = [one for one in served if one.status == 200]
    assert stack.address(name) not in {server_of(one) for one in retried}
    for one in retried:
        await known(client, one)


async def test_restarted_router_knows_owners(client: Client, stack: Stack) -> None:
    last = await respond(client)
    await routers_restart(stack)
    await known(client, last)


async def test_response_of_dead_replica_is_not_found(client: Client, stack: Stack) -> None:
    last = await respond(client)
    holder = stack.name_of(server_of(last))
    await stack.kill(holder)
    await until_read(lambda: client.replica(holder), lambda now: not now["healthy"])
    answer = await respond(client, previous_response_id=id_of(last))
    assert answer.status == 404
    await stack.start(holder)
    await stack.wait_routing()
