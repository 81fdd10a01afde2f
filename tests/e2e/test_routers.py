"""Two routers of one pool agree on the replicas of sessions and on the owners of stored responses.

vLLM stores a response in the memory of one process, its owner.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from socket import gethostname
from typing import Any

import grpc
import pytest

from extproc.lab.harness.envoy_config import Bootstrap
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import EnvoyClient, RoutedAnswer
from tests.e2e.stack import PatientStack, ext_proc_of, here
from tests.proxy.envoy_side import EnvoySide
from tests.proxy.replies import destination
from tests.waiting import until

REPLICAS = tuple(SimulatedReplica(f"r{number}", "llama-8b-h100") for number in range(4))
RESPONSES = "/v1/responses"
TIMES = 6  # requests that hit the same one of four replicas by chance in one of 4,096 cases
TURNS = 24  # requests for which Envoy asks the same router by chance in one of 8 million cases
_AFFINITY: dict[str, dict[str, object]] = {
    "route": {
        "policy": "round_robin",
        "session_header": "x-session-id",
        "session_cookie": "sid",
        "session_cost_s": 0.5,
    },
    "serve": {"chunks_per_s": 0.0, "drain_s": 1.0},
}


class RouterPair(PatientStack):
    """Two routers and four equal replicas; Envoy sends the headers that name sessions."""

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        headers = ["request.headers['x-session-id']", "request.headers['cookie']"]
        ext_proc_of(bootstrap)["request_attributes"] += headers
        return bootstrap


system = partial(RouterPair, replicas=here(REPLICAS), settings=_AFFINITY, routers=2)


async def routed_by_each(client: EnvoyClient) -> list[float]:
    return [await client.routed(router) for router in client.stack.routers]


@asynccontextmanager
async def both_routers_asked(client: EnvoyClient) -> AsyncIterator[None]:
    before = await routed_by_each(client)
    yield
    after = await routed_by_each(client)
    assert all(now > then for now, then in zip(after, before, strict=True))


def server_of(answer: RoutedAnswer) -> str:
    return answer.headers["x-served-by"]


async def short(client: EnvoyClient, headers: dict[str, str]) -> RoutedAnswer:
    """Send a chat with a small bound, which costs about the same on every replica."""
    return await client.chat(headers=headers, max_tokens=8)


async def stays(client: EnvoyClient, headers: dict[str, str]) -> str:
    """Wait until both routers send the session to one replica; return its address."""
    served: list[str] = []

    async def settled() -> bool:
        before = await routed_by_each(client)
        served[:] = [server_of(await short(client, headers)) for _ in range(TIMES)]
        after = await routed_by_each(client)
        both_asked = all(now > then for now, then in zip(after, before, strict=True))
        return both_asked and len(set(served)) == 1

    await until(settled)
    return served[0]


@pytest.mark.parametrize("named", [{"x-session-id": "a"}, {"cookie": "x=y; sid=b"}])
async def test_session_stays_on_its_replica(client: EnvoyClient, named: dict[str, str]) -> None:
    home = await stays(client, named)
    async with both_routers_asked(client):
        again = [await short(client, named) for _ in range(TURNS)]
    assert {server_of(answer) for answer in again} == {home}


async def test_restarted_routers_know_sessions_and_owners(
    client: EnvoyClient, stack: PatientStack
) -> None:
    named = {"x-session-id": "restart"}
    home, response = await stays(client, named), await respond(client)
    for router in stack.routers:
        await stack.kill(router)
        await stack.start(router)
    await stack.wait_routing()
    assert await stays(client, named) == home
    await known(client, response)


async def respond(client: EnvoyClient, **fields: Any) -> RoutedAnswer:
    body = {"model": MODEL, "input": "Tell me of the sea."} | fields
    return await client.request("POST", RESPONSES, body, {"x-simulate-output-tokens": "8"})


def id_of(answer: RoutedAnswer) -> str:
    if answer.headers["Content-Type"].startswith("text/event-stream"):
        data = answer.body.partition(b"data: ")[2].partition(b"\n")[0]
        return str(json.loads(data)["response"]["id"])
    return str(json.loads(answer.body)["id"])


async def known(client: EnvoyClient, answer: RoutedAnswer) -> None:
    """Wait until every router knows the owner of a response; assert that requests go there."""
    stack, path = client.stack, f"{RESPONSES}/{id_of(answer)}"

    async def owner(router: str) -> str:
        async with (
            grpc.aio.insecure_channel(stack.address(router)) as channel,
            EnvoySide(channel).stream() as stream,
        ):
            reply = await stream.request_headers(path, "GET", end_of_stream=True)
            return next(iter(destination(reply)), "")

    async def agreed() -> bool:
        return {await owner(router) for router in stack.routers} == {server_of(answer)}

    await until(agreed)
    for _ in range(TIMES):
        asked = await client.request("GET", path)
        assert server_of(asked) == server_of(answer)
        assert asked.decisions == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_conversation_goes_on_at_its_owner(client: EnvoyClient, streamed: bool) -> None:
    async with both_routers_asked(client):
        last = await respond(client, stream=streamed)
        owner = server_of(last)
        for _ in range(TURNS):
            await known(client, last)
            last = await respond(client, stream=streamed, previous_response_id=id_of(last))
            assert server_of(last) == owner


async def test_page_links_to_the_page_of_the_other_router(
    client: EnvoyClient, stack: PatientStack
) -> None:
    name, url = f"{gethostname()}:{stack.ports['router-2']}", f"{stack.admin('router-2')}/"

    async def linked() -> bool:
        snapshot = await client.snapshot()
        return bool(snapshot["links"] == {name: url} and name in dict(snapshot["facts"])["Routers"])

    await until(linked)
