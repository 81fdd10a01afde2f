"""Requests leave when they are due, and every failure is counted for what it is."""

import asyncio
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.limits import allow_many_connections
from benchmarks.load.client import Client, Sent, connections
from benchmarks.load.plan import Planned
from benchmarks.load.prompts import Counting
from benchmarks.load.target import Endpoint, Target
from benchmarks.trace import TracedRequest
from extproc.clock import monotonic
from extproc.demo.processes import Process, answers, free_port
from extproc.simulator.server import SERVED_BY_HEADER

TARGET = Target("simulated", None, {"chat": Counting(8), "completions": Counting()})
WHOLE = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def requests(
    count: int, every_s: float = 0.0, endpoint: Endpoint = "completions", streamed: bool = True
) -> list[Planned]:
    return [
        Planned(
            number, TracedRequest((number - 1) * every_s, 60, 20, 64), endpoint, streamed, 64, False
        )
        for number in range(1, count + 1)
    ]


async def send(url: str, plan: list[Planned], timeout_s: float = 30.0) -> list[Sent]:
    async with connections(timeout_s) as session:
        client = Client(session, url, TARGET, "0", "run", {}, monotonic)
        await client.run(plan)
    return client.traffic.sent


async def to_server(handler: Handler, plan: list[Planned], timeout_s: float = 30.0) -> list[Sent]:
    app = web.Application()
    app.add_routes([web.post("/v1/{path:.*}", handler)])
    async with TestServer(app) as server:
        return await send(str(server.make_url("")).rstrip("/"), plan, timeout_s)


async def test_requests_arrive_while_none_is_answered() -> None:
    waiting, all_there = 0, asyncio.Event()

    async def stall(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == 50:
            all_there.set()
        await all_there.wait()
        return web.Response(body=WHOLE, content_type="text/event-stream")

    plan = requests(50, every_s=0.002)
    sent = await to_server(stall, plan)
    assert [one.at_s for one in sent] == [one.at_s for one in plan]
    assert [one.error for one in sent] == [None] * 50
    assert all(one.late_s > -0.01 for one in sent)


async def test_lateness_is_what_kept_the_client_from_sending() -> None:
    now = 100.0

    def clock() -> float:
        nonlocal now
        now += 0.5  # each look at the clock takes half a second
        return now

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=WHOLE)

    app = web.Application()
    app.add_routes([web.post("/v1/{path:.*}", answer)])
    async with TestServer(app) as server, connections(30.0) as session:
        url = str(server.make_url("")).rstrip("/")
        client = Client(session, url, TARGET, "0", "run", {}, clock)
        await client.run(requests(2))
    assert [one.late_s for one in client.traffic.sent] == [1.5, 2.0]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_simulated_replica(replica_url: str, endpoint: Endpoint, streamed: bool) -> None:
    sent = await send(replica_url, requests(5, endpoint=endpoint, streamed=streamed))
    for one in sent:
        assert (one.status, one.error) == (200, None)
        assert (one.counted_prompt_tokens, one.output_tokens) == (60, 20)
        assert one.replica == replica_url.removeprefix("http://")
        assert one.completion_s is not None
        if streamed:
            assert one.ttft_s is not None
            assert one.gaps_s is not None
            assert 0 < one.gaps_s["mean"] <= one.gaps_s["p99"] <= one.gaps_s["max"]
            assert one.ttft_s + one.gaps_s["max"] <= one.completion_s
        else:
            assert (one.ttft_s, one.gaps_s) == (None, None)
    assert len({one.request_id for one in sent}) == 5


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "full"}}, status=503)


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


async def say_something_else(request: web.Request) -> web.StreamResponse:
    return web.json_response({"hello": "world"})


async def count_in_words(request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "a"}], "usage": "many"})


@pytest.mark.parametrize(
    ("handler", "streamed", "error"),
    [
        (refuse, True, "status 503"),
        (refuse, False, "status 503"),
        (hang, True, "timeout"),
        (hang_up, True, "disconnected"),
        (break_off, True, "broken stream"),
        (break_off, False, "broken answer"),
        (fail_midway, True, "error event"),
        (say_something_else, False, "not a completion"),
        (count_in_words, False, "not a completion"),
    ],
)
async def test_what_fails_is_told_apart(handler: Handler, streamed: bool, error: str) -> None:
    (sent,) = await to_server(handler, requests(1, streamed=streamed), timeout_s=0.3)
    assert sent.error == error
    assert sent.completion_s is None
    assert sent.failed_after_s is not None
    assert sent.replica == ("a-0" if handler is break_off else None)


async def test_nobody_listens(unused_tcp_port: int) -> None:
    sent = await send(f"http://127.0.0.1:{unused_tcp_port}", requests(3))
    assert [one.error for one in sent] == ["connect"] * 3


async def test_gaps_are_of_whole_streams() -> None:
    """The stream has gaps, each chunk is read before the next is written, and no end."""
    read = asyncio.Event()

    def clock() -> float:
        read.set()  # it looks at the clock when a chunk comes
        return monotonic()

    async def forget_the_end(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(3):
            read.clear()
            await response.write(b'data: {"choices":[{"text":"a"}]}\n\n')
            await read.wait()
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/{path:.*}", forget_the_end)])
    async with TestServer(app) as server, connections(30.0) as session:
        client = Client(
            session, str(server.make_url("")).rstrip("/"), TARGET, "0", "run", {}, clock
        )
        await client.run(requests(1))
    (sent,) = client.traffic.sent
    assert sent.error == "broken stream"
    assert sent.gaps_s is not None
    assert not client.traffic.gaps_s


@pytest.mark.parametrize("few", [256, 20_000, resource.RLIM_INFINITY])
def test_connections_where_files_have_no_limit(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS has it: the hard limit is infinite, and asking for that many is an error."""
    asked = []

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        asked.append(limits[0])
        if limits[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr("resource.getrlimit", lambda _: (few, resource.RLIM_INFINITY))
    monkeypatch.setattr("resource.setrlimit", set_limit)
    allow_many_connections()
    assert asked == {256: [10_240], 20_000: [20_000]}.get(few, [])


@pytest.mark.process
async def test_a_target_that_dies_and_comes_back(tmp_path: Path) -> None:
    """Its requests fail meanwhile, the others do not, and the run goes on to its end."""
    port, back = free_port(), False
    url = f"http://127.0.0.1:{port}"

    async def start() -> Process:
        argv = [sys.executable, "-m", "extproc", "simulate", "--port", str(port)]
        ready = answers(f"{url}/health")
        return await Process.start("replica", argv, log=tmp_path / "replica.log", ready=ready)

    async def until(reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not reached():  # noqa: ASYNC110 - of figures, which tell nobody
                await asyncio.sleep(0.01)

    def plan() -> Iterator[Planned]:
        """A hundred a second, until ten were sent to the server that is back."""
        left = 10
        for planned in requests(100_000, every_s=0.01):
            left -= back
            if left < 0:
                return
            yield planned

    async with connections(60.0) as session:
        client = Client(session, url, TARGET, "0", "run", {}, monotonic)
        traffic = client.traffic
        replica = await start()
        running = asyncio.create_task(client.run(plan()))
        await until(lambda: traffic.in_flight > 5 and traffic.ended > 5)
        await replica.kill()
        await until(lambda: traffic.failed > traffic.most_in_flight)
        async with await start():
            back = True
            await running
    sent = traffic.sent
    assert len(sent) == traffic.ended
    assert sent[0].error is None
    assert [one.error for one in sent[-10:]] == [None] * 10
    kinds = {one.error for one in sent if one.error}
    assert {"connect", "broken stream"} <= kinds <= {"connect", "broken stream", "disconnected"}
