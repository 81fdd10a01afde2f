import asyncio
import json
from pathlib import Path
from random import Random

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.overhead import __main__ as overhead
from benchmarks.overhead.client import Load, request
from benchmarks.overhead.stack import Setup


async def serve(statuses: list[int]) -> TestServer:
    async def answer(received: web.Request) -> web.Response:
        body = await received.json()
        assert body["stream"]
        return web.Response(status=statuses.pop(0) if len(statuses) > 1 else statuses[0])

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    server = TestServer(app)
    await server.start_server()
    return server


async def test_the_client_keeps_so_many_in_flight() -> None:
    async with await serve([200]) as server:
        assert server.port
        report = await Load(server.port, request()).at_once(5, seconds=1.0)
    assert report.most_at_once == 5
    assert report.answered > 5
    assert report.failed == 0
    assert 0 < report.p50_ms <= report.p95_ms <= report.p99_ms <= 1000 * report.seconds


async def test_the_client_sends_at_a_rate_and_counts_what_fails() -> None:
    async with await serve([200, 503, 200]) as server:
        assert server.port
        report = await Load(server.port, request()).at_rate(500.0, 20, Random(0))
    assert (report.answered, report.failed) == (19, 1)


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"a\r\ndata: one\n\r\n"
    b"D\r\ndata: [0\r\n0\r\n\r\n"
    b"0\r\n\r\n"
)
"""Answer whose second chunk contains the bytes of an end."""


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_the_client_takes_answers_in_chunks(size: int) -> None:
    over: list[asyncio.Event] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over.append(asyncio.Event())
        ended = over[-1]
        await reader.readexactly(len(request()))
        for start in range(0, len(CHUNKED), size):
            writer.write(CHUNKED[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.write_eof()
        await reader.read()  # the client has closed its end, too
        writer.close()
        ended.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        report = await Load(port, request()).at_once(5, seconds=0.0)
        await asyncio.gather(*(one.wait() for one in over))
    assert (report.answered, report.failed) == (5, 0)


@pytest.mark.process
def test_it_measures_streamed_answers_beside_those_of_one_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead, "STREAM_WARM_UP_S", 0.1)
    report = tmp_path / "streams.json"
    arguments = ["--replicas", "2", "--seconds", "0.2", "--stream", "5", "--json", str(report)]
    assert overhead.main(arguments) == 0
    figures = json.loads(report.read_text())["streams"]
    settings = [(one["tokens"], one["rate"]) for one in figures]
    assert settings == [(1, 100), (1, 200), (5, 100), (5, 200)]
    assert [one["report"]["answered"] for one in figures] == [20, 40, 20, 40]
    assert all(one["report"]["p50_ms"] > 30 for one in figures if one["tokens"] == 5)
    assert len(capsys.readouterr().out.splitlines()) == 4 + len(figures)


@pytest.mark.process
def test_it_measures_envoy_alone_a_server_that_does_nothing_and_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead, "WARM_UP_S", 0.1)
    monkeypatch.setattr(overhead, "HELD_S", 0.3)
    report = tmp_path / "overhead.json"
    arguments = ["--replicas", "3", "--seconds", "0.3", "--in-flight", "30"]
    assert overhead.main([*arguments, "--json", str(report)]) == 0
    figures = json.loads(report.read_text())["setups"]
    names = [one["name"] for one in figures]
    assert names == ["Envoy alone", "+ do-nothing ext_proc", "+ router, 3 replicas"]
    assert Setup("extproc", 1).name == "+ router, 1 replica"
    for one in figures:
        assert one["rate"]["answered"] == 90
        assert one["at_once"]["most_at_once"] == 64
        assert one["held"]["most_at_once"] == 30
    assert all(one["cpu_us"] > 0 for one in figures[1:])
    assert len(capsys.readouterr().out.splitlines()) == 4 + len(figures)
