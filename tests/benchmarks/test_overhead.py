"""``benchmarks.overhead``: its client counts and times every answer; it measures three setups."""

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from random import Random

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.overhead import __main__ as overhead
from benchmarks.overhead.client import ClientReport, LoadGenerator, request
from benchmarks.overhead.stack import Setup

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"a\r\ndata: one\n\r\n"
    b"D\r\ndata: [0\r\n0\r\n\r\n"  # a chunk that contains the bytes of an end
    b"0\r\n\r\n"
)


async def test_open_loop_counts_failures() -> None:
    statuses = iter([200, 503])

    async def answer(received: web.Request) -> web.Response:
        assert (await received.json())["stream"]
        return web.Response(status=next(statuses, 200))

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    async with TestServer(app) as server:
        assert server.port
        report = await LoadGenerator(server.port, request()).at_rate(500.0, 20, Random(0))
    assert (report.answered, report.failed) == (19, 1)
    assert 0 < report.p50_ms <= report.p95_ms <= report.p99_ms <= 1000 * report.seconds


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_client_finds_the_end_of_a_chunked_answer(size: int) -> None:
    closed: list[asyncio.Event] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed.append(ended := asyncio.Event())
        await reader.readexactly(len(request()))
        for start in range(0, len(CHUNKED), size):
            writer.write(CHUNKED[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.write_eof()
        await reader.read()  # until the client closes its end
        writer.close()
        ended.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        report = await LoadGenerator(port, request()).at_once(5, seconds=0.0)
        await asyncio.gather(*(ended.wait() for ended in closed))
    assert (report.answered, report.failed) == (5, 0)


def test_added_latency_is_relative_to_envoy_alone_in_the_same_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    latencies_ms = iter([1.0, 3.0, 5.0, 2.0, 5.0, 8.0])

    async def measure(stack: object, name: str, *_: object) -> overhead.SetupFigures:
        report = ClientReport(1, 0, 1.0, 1, *[next(latencies_ms)] * 3)
        return overhead.SetupFigures(name, report, report, report, 1.0, 1.0)

    monkeypatch.setattr(overhead, "_measure", measure)
    monkeypatch.setattr(overhead, "OverheadStack", lambda *_: nullcontext())
    assert overhead.main(["--replicas", "8", "--rounds", "2"]) == 0
    rows = [line.split()[-8:] for line in capsys.readouterr().out.splitlines()[4:]]
    assert [row[1] for row in rows] == ["0.00", "2.00", "4.00", "0.00", "3.00", "6.00"]


@pytest.mark.process
def test_overhead_of_envoy_alone_idle_ext_proc_and_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead, "WARM_UP_S", 0.1)
    monkeypatch.setattr(overhead, "HELD_S", 0.3)
    report = tmp_path / "overhead.json"
    arguments = ["--replicas", "3", "--seconds", "0.3", "--in-flight", "30"]
    assert overhead.main([*arguments, "--json", str(report)]) == 0
    setups = json.loads(report.read_text())["setups"]
    names = [setup["name"] for setup in setups]
    assert names == ["Envoy alone", "+ do-nothing ext_proc", "+ router, 3 replicas"]
    assert Setup("extproc", 1).name == "+ router, 1 replica"
    for setup in setups:
        assert setup["rate"]["answered"] == 90
        assert setup["at_once"]["answered"] > 64
        assert setup["failed"] == 0
        assert setup["at_once"]["most_at_once"] == 64
        assert setup["held"]["most_at_once"] == 30
    assert all(setup["cpu_us"] > 0 for setup in setups[1:])
    assert len(capsys.readouterr().out.splitlines()) == 4 + len(setups)
