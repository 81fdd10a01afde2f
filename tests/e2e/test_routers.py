"""Two routers of one pool agree on the replicas of sessions and on the owners of stored responses.

vLLM stores a response in the memory of one process, its owner.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from socket import gethostname
from typing import Any

import grpc
import pytest

from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import EnvoyClient, RoutedAnswer
from tests.e2e.stack import PatientStack, here, replicas
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


system = partial(
    PatientStack,
    replicas=here(REPLICAS),
    settings=_AFFINITY,
    headers=("x-session-id", "cookie"),
    routers=2,
)


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


async def test_new_sessions_and_sessionless_requests_are_spread(client: EnvoyClient) -> None:
    """At least one router gets eight of sixteen requests, two for each replica."""
    without = [client.chat() for _ in range(16)]
    answers = await asyncio.gather(*without)
    assert len({server_of(answer) for answer in answers}) == len(REPLICAS)
    new = [client.chat(headers={"x-session-id": f"new-{number}"}) for number in range(16)]
    answers = await asyncio.gather(*new)
    assert len({server_of(answer) for answer in answers}) == len(REPLICAS)


async def test_restarted_routers_know_sessions_and_owners(client: EnvoyClient) -> None:
    named = {"x-session-id": "restart"}
    home, response = await stays(client, named), await respond(client)
    for router in client.stack.routers:
        await client.stack.kill(router)
        await client.stack.start(router)
    await client.stack.wait_routing()
    assert await stays(client, named) == home
    await known(client, response)


async def test_session_leaves_draining_and_dead_replicas(client: EnvoyClient) -> None:
    named = {"x-session-id": "leaves"}
    home = await stays(client, named)
    assert await replicas(client.stack, "drain", home) == 0
    await client.replica_is(client.stack.name_of(home), lambda now: now["draining"])
    second = await stays(client, named)
    assert second != home
    assert await replicas(client.stack, "undrain", home) == 0
    await client.stack.kill(client.stack.name_of(second))
    await client.replica_is(client.stack.name_of(second), lambda now: not now["healthy"])
    assert await stays(client, named) != second
    await client.stack.start(client.stack.name_of(second))
    await client.stack.wait_routing()


async def respond(
    client: EnvoyClient, tokens: int = 8, status: int | None = 200, **fields: Any
) -> RoutedAnswer:
    body = {"model": MODEL, "input": "Tell me of the sea."} | fields
    wanted = {"x-simulate-output-tokens": str(tokens)}
    return await client.request("POST", RESPONSES, body, wanted, status)


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


async def test_conversation_is_not_retried_elsewhere(client: EnvoyClient) -> None:
    """Another replica would answer 404, which Envoy does not retry."""
    last = await respond(client)
    await known(client, last)
    owner = client.stack.name_of(server_of(last))
    async with client.simulating(owner, fail=503):
        await respond(client, status=503, previous_response_id=id_of(last))


async def output_of(stack: PatientStack, *arguments: str) -> tuple[str, str]:
    """Run a command with the configuration of the first router; return stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", *arguments, "--config", str(stack.config_file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0
    return output.decode(), errors.decode()


async def test_commands_ask_all_routers(client: EnvoyClient) -> None:
    names = [f"{gethostname()}:{client.stack.ports[router]}" for router in client.stack.routers]

    async def both_named() -> bool:
        output, errors = await output_of(client.stack, "top", "--once")
        return not errors and all(f"\n{name} " in output for name in names)

    await until(both_named)
    async with both_routers_asked(client):
        for _ in range(TURNS):
            await client.chat()
    output, errors = await output_of(client.stack, "explain", "--last", str(2 * TURNS), "--json")
    records = json.loads(output)
    assert ({record["router"] for record in records}, errors) == ({*names}, "")
    times = [record["decided_at"] for record in records]
    assert times == sorted(times)
    for name in names:
        request = next(each["request_id"] for each in records if each["router"] == name)
        output, errors = await output_of(client.stack, "explain", request)
        assert (output.splitlines()[0], errors) == (f"router    {name}", "")


async def test_page_links_to_the_page_of_the_other_router(client: EnvoyClient) -> None:
    name, url = (
        f"{gethostname()}:{client.stack.ports['router-2']}",
        f"{client.stack.admin('router-2')}/",
    )

    async def linked() -> bool:
        snapshot = await client.snapshot()
        return bool(snapshot["links"] == {name: url} and name in dict(snapshot["facts"])["Routers"])

    await until(linked)
