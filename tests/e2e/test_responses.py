"""vLLM keeps a response in the memory of one process: what is about it has to go there."""

import asyncio
import json
from typing import Any

import grpc
import pytest
import pytest_asyncio

from extproc.lab.harness.stack import MODEL
from tests.e2e.client import Answer, Client
from tests.e2e.stack import Stack
from tests.e2e.systems import Routers
from tests.proxy.envoy_side import EnvoySide
from tests.proxy.replies import destination
from tests.waiting import until, until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

RESPONSES = "/v1/responses"
REPLICAS = Routers.FLEET
TIMES = 6  # by chance it is the right one of four replicas so often in one of 4,096 cases
TURNS = 24  # by chance Envoy asks only one of two routers so often in one of eight million cases


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(routers: Stack) -> Stack:
    return routers


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


def server_of(answer: Answer) -> str:
    return answer.headers["x-served-by"]


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
            (holder,) = {*destination(reply)}
            return holder

    async def held() -> bool:
        return {await held_by(router) for router in stack.routers} == {server_of(answer)}

    await until(held)
    for _ in range(TIMES):
        asked = await client.request("GET", path)
        assert (asked.status, server_of(asked)) == (200, server_of(answer))
        assert asked.decisions == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_goes_on_where_it_is_held(client: Client, streamed: bool) -> None:
    before = await client.routed_by_each()
    last = await respond(client, stream=streamed)
    holder = server_of(last)
    for _ in range(TURNS):
        await known(client, last)
        last = await respond(client, stream=streamed, previous_response_id=id_of(last))
        assert (last.status, server_of(last)) == (200, holder)
    after = await client.routed_by_each()
    assert all(now > then for now, then in zip(after, before, strict=True))


async def test_a_retry_stays_where_the_conversation_is_held(client: Client, stack: Stack) -> None:
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


async def test_work_in_the_background_is_asked_for_and_cancelled_there(client: Client) -> None:
    queued = await respond(client, tokens=5_000, background=True)
    assert json.loads(queued.body)["status"] == "queued"
    await known(client, queued)
    cancelled = await client.request("POST", f"{RESPONSES}/{id_of(queued)}/cancel")
    assert (cancelled.status, server_of(cancelled)) == (200, server_of(queued))
    assert json.loads(cancelled.body)["status"] == "cancelled"
    await client.ledger_empty()


async def test_a_response_that_nobody_knows_is_not_found(client: Client) -> None:
    assert (await client.request("GET", f"{RESPONSES}/resp_unknown")).status == 404
    answer = await respond(client, previous_response_id="resp_unknown")
    assert answer.status == 404


async def test_other_requests_are_routed_as_ever(client: Client) -> None:
    answers = await asyncio.gather(*(respond(client) for _ in range(len(REPLICAS) * 4)))
    assert {server_of(answer) for answer in answers} == {
        client._stack.address(one.name) for one in REPLICAS
    }


async def test_after_a_retry_it_is_with_whoever_served(client: Client, stack: Stack) -> None:
    """The one chosen first fails; Envoy takes the second choice."""
    name = REPLICAS[0].name
    await client.simulate(name, fail=503)
    served = [await respond(client) for _ in range(len(REPLICAS) * 2)]
    await client.simulate(name, fail=0)
    retried = [one for one in served if one.status == 200]
    assert stack.address(name) not in {server_of(one) for one in retried}
    for one in retried:
        await known(client, one)


async def test_a_router_that_starts_again_knows_what_was_told(client: Client, stack: Stack) -> None:
    last = await respond(client)
    for router in stack.routers:
        await stack.kill(router)
        await stack.start(router)
    await stack.wait_routing()

    await known(client, last)


async def test_a_replica_that_is_gone_is_not_waited_for(client: Client, stack: Stack) -> None:
    last = await respond(client)
    holder = stack.name_of(server_of(last))
    await stack.kill(holder)
    await until_read(lambda: client.replica(holder), lambda now: not now["healthy"])
    answer = await respond(client, previous_response_id=id_of(last))
    assert answer.status == 404
    await stack.start(holder)
    await stack.wait_routing()
