"""The load client sends requests when they are due, and names each kind of failure."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from extproc.ground.clock import Clock, monotonic
from extproc.lab.harness.processes import free_port
from extproc.lab.harness.traffic import Answer, Client, TimedRequest
from extproc.lab.simulator import OUTPUT_TOKENS_HEADER, SERVED_BY_HEADER
from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import serving

WHOLE = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
CHAT = {"model": "m", "messages": [{"role": "user", "content": "one two three"}]}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def requests(count: int, every_s: float = 0.0, stream: bool = True) -> Iterator[TimedRequest]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(CHAT | (usage if stream else {})).encode()
    for number in range(count):
        path, headers = "/v1/chat/completions", {OUTPUT_TOKENS_HEADER: "20"}
        yield TimedRequest(number * every_s, f"r-{number}", path, body, stream, headers)


async def send(
    url: str, plan: Iterator[TimedRequest], timeout_s: float = 30.0, clock: Clock = monotonic
) -> list[Answer]:
    async with Client(url, timeout_s, clock) as client:
        return await client.run(plan)


async def to_server(
    handler: Handler,
    plan: Iterator[TimedRequest],
    timeout_s: float = 30.0,
    clock: Clock = monotonic,
) -> list[Answer]:
    app = web.Application()
    app.add_routes([web.post("/v1/{path:.*}", handler)])
    async with TestServer(app) as server:
        return await send(str(server.make_url("")).rstrip("/"), plan, timeout_s, clock)


async def whole(request: web.Request) -> web.Response:
    return web.Response(body=WHOLE)


async def test_requests_do_not_wait_for_answers() -> None:
    waiting, all_arrived = 0, asyncio.Event()

    async def stall(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == 50:
            all_arrived.set()
        await all_arrived.wait()
        return await whole(request)

    sent = await to_server(stall, requests(50, every_s=0.002))
    assert [answer.request_id for answer in sent] == [each.request_id for each in requests(50)]
    assert all(answer.ok and answer.late_s > -0.01 for answer in sent)


async def test_lateness_is_the_delay_of_the_client() -> None:
    now = 100.0

    def clock() -> float:
        nonlocal now
        now += 0.5  # each reading takes half a second
        return now

    sent = await to_server(whole, requests(2), clock=clock)
    assert [answer.late_s for answer in sent] == [1.5, 2.0]


@pytest.fixture
async def replica_url() -> AsyncIterator[str]:
    settings = ReplicaSettings(model="m", profile="llama-8b-h100", speed=50)
    async with serving(Replica(settings), "127.0.0.1", 0) as (port, _):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_of_a_simulated_replica_are_measured(replica_url: str, stream: bool) -> None:
    for answer in await send(replica_url, requests(5, stream=stream)):
        assert (answer.status, answer.problem) == (200, "")
        assert (answer.tokens("prompt"), answer.tokens("completion")) == (12, 20)
        assert answer.replica == replica_url.removeprefix("http://")
        if stream:
            assert answer.ttft_s is not None
            assert max(answer.gaps_s) > 0
            assert answer.ttft_s + sum(answer.gaps_s) <= answer.completion_s
        else:
            assert (answer.ttft_s, len(answer.gaps_s)) == (None, 0)


def says(body: object, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return handler


refuse = says({"error": {"message": "full"}}, status=503)


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def break_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={SERVED_BY_HEADER: "a-0"})
    await response.prepare(request)
    await response.write(WHOLE[:40])
    assert request.transport is not None
    request.transport.close()
    return response


@pytest.mark.parametrize(
    ("handler", "stream", "problem"),
    [
        (refuse, True, "status 503"),
        (refuse, False, "status 503"),
        (hang, True, "timeout"),
        (hang_up, True, "disconnected"),
        (break_off, True, "broken stream"),
        (break_off, False, "broken answer"),
        (says({"hello": "world"}), False, "not a completion"),
        (says({"choices": [{"text": "a"}], "usage": "many"}), False, "not a completion"),
    ],
)
async def test_problem_names_the_kind_of_failure(
    handler: Handler, stream: bool, problem: str
) -> None:
    timeout_s = 0.3 if handler is hang else 30.0
    (sent,) = await to_server(handler, requests(1, stream=stream), timeout_s)
    assert (sent.ok, sent.problem) == (False, problem)
    assert sent.account.startswith(problem)
    assert sent.completion_s > 0
    assert sent.replica == ("a-0" if handler is break_off else None)


async def test_error_response_is_in_the_account() -> None:
    (sent,) = await to_server(refuse, requests(1))
    assert sent.account == 'status 503: {"error": {"message": "full"}}'


async def test_refused_connections_are_connect_failures() -> None:
    sent = await send(f"http://127.0.0.1:{free_port()}", requests(3))
    assert [answer.problem for answer in sent] == ["connect"] * 3
