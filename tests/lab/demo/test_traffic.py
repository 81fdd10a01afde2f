"""Requests leave when they are due, and every failure is counted for what it is."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from extproc.ground.clock import Clock, monotonic
from extproc.lab.harness.processes import Process, answers, free_port
from extproc.lab.harness.traffic import OUTPUT_HEADER, Answer, Client, TimedRequest
from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import OUTPUT_TOKENS_HEADER, SERVED_BY_HEADER, start
from tests.waiting import until

WHOLE = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
CHAT = {"model": "m", "messages": [{"role": "user", "content": "one two three"}]}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def requests(count: int, every_s: float = 0.0, stream: bool = True) -> Iterator[TimedRequest]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(CHAT | (usage if stream else {})).encode()
    for number in range(count):
        path, told = "/v1/chat/completions", {OUTPUT_HEADER: "20"}
        yield TimedRequest(number * every_s, f"r-{number}", path, body, stream, told)


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


async def test_requests_arrive_while_none_is_answered() -> None:
    waiting, all_there = 0, asyncio.Event()

    async def stall(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == 50:
            all_there.set()
        await all_there.wait()
        return await whole(request)

    sent = await to_server(stall, requests(50, every_s=0.002))
    assert [one.request_id for one in sent] == [one.request_id for one in requests(50)]
    assert all(one.ok and one.late_s > -0.01 for one in sent)


async def test_lateness_is_what_kept_the_client_from_sending() -> None:
    now = 100.0

    def clock() -> float:
        nonlocal now
        now += 0.5  # each look at the clock takes half a second
        return now

    sent = await to_server(whole, requests(2), clock=clock)
    assert [one.late_s for one in sent] == [1.5, 2.0]


@pytest.fixture
async def replica_url() -> AsyncIterator[str]:
    settings = ReplicaSettings(model="m", profile="llama-8b-h100", speed=50)
    serving = await start(Replica(settings), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{serving.port}"
    await serving.runner.cleanup()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_simulated_replica(replica_url: str, stream: bool) -> None:
    assert OUTPUT_HEADER == OUTPUT_TOKENS_HEADER
    for one in await send(replica_url, requests(5, stream=stream)):
        assert (one.status, one.problem) == (200, "")
        assert (one.tokens("prompt"), one.tokens("completion")) == (12, 20)
        assert one.replica == replica_url.removeprefix("http://")
        if stream:
            assert one.ttft_s is not None
            assert max(one.gaps_s) > 0
            assert one.ttft_s + sum(one.gaps_s) <= one.completion_s
        else:
            assert (one.ttft_s, len(one.gaps_s)) == (None, 0)


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


async def fail_midway(request: web.Request) -> web.StreamResponse:
    event = b'data: {"error": {"message": "out of memory"}}\n\n'
    return web.Response(body=WHOLE[:34] + event + b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("handler", "stream", "problem"),
    [
        (refuse, True, "status 503"),
        (refuse, False, "status 503"),
        (hang, True, "timeout"),
        (hang_up, True, "disconnected"),
        (break_off, True, "broken stream"),
        (break_off, False, "broken answer"),
        (fail_midway, True, "error event"),
        (says({"hello": "world"}), False, "not a completion"),
        (says({"choices": [{"text": "a"}], "usage": "many"}), False, "not a completion"),
    ],
)
async def test_what_fails_is_told_apart(handler: Handler, stream: bool, problem: str) -> None:
    timeout_s = 0.3 if handler is hang else 30.0
    (sent,) = await to_server(handler, requests(1, stream=stream), timeout_s)
    assert (sent.ok, sent.problem) == (False, problem)
    assert sent.account.startswith(problem)
    assert sent.completion_s > 0
    assert sent.replica == ("a-0" if handler is break_off else None)


async def test_what_was_said_in_place_of_an_answer_is_kept() -> None:
    (sent,) = await to_server(refuse, requests(1))
    assert sent.account == 'status 503: {"error": {"message": "full"}}'


async def test_nobody_listens() -> None:
    sent = await send(f"http://127.0.0.1:{free_port()}", requests(3))
    assert [one.problem for one in sent] == ["connect"] * 3


@pytest.mark.process
async def test_a_target_that_dies_and_comes_back(tmp_path: Path) -> None:
    """Requests fail while the server is away, others do not, and the run goes on to its end."""
    port, back = free_port(), False
    url = f"http://127.0.0.1:{port}"

    async def start() -> Process:
        argv = [sys.executable, "-m", "extproc", "simulate", "--port", str(port), "--model", "m"]
        ready = answers(f"{url}/health")
        return await Process.start("replica", argv, log=tmp_path / "replica.log", ready=ready)

    def plan() -> Iterator[TimedRequest]:
        """Hundred requests a second, until ten were sent to the server that is back."""
        left = 10
        for planned in requests(100_000, every_s=0.01):
            left -= back
            if left < 0:
                return
            yield planned

    async with Client(url, 60.0) as client:
        replica = await start()
        running = asyncio.create_task(client.run(plan()))
        await until(lambda: client.in_flight > 5 and client.ended > 5)
        await replica.kill()
        await until(lambda: client.failed > client.most_in_flight)
        async with await start():
            back = True
            sent = await running
    assert len(sent) == client.ended
    assert sent[0].ok
    assert all(one.ok for one in sent[-9:])
    kinds = {one.problem for one in sent if not one.ok}
    assert {"connect", "broken stream"} <= kinds <= {"connect", "broken stream", "disconnected"}
