import json
from pathlib import Path
from random import Random

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.overhead import __main__ as overhead
from benchmarks.overhead.client import Load, request


async def serve(statuses: list[int]) -> TestServer:
    """A server that answers with each status in turn, and with the last for ever."""

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
        report = await Load(server.port, request()).at_once(5, seconds=0.1)
    assert report.most_at_once == 5
    assert report.answered > 5
    assert report.failed == 0
    assert 0 < report.p50_ms <= report.p95_ms <= report.p99_ms <= 1000 * report.seconds


async def test_the_client_sends_at_a_rate_and_counts_what_fails() -> None:
    async with await serve([200, 503, 200]) as server:
        assert server.port
        report = await Load(server.port, request()).at_rate(500.0, 20, Random(0))
    assert (report.answered, report.failed) == (19, 1)


async def test_a_port_that_nobody_listens_on_fails_every_request(unused_tcp_port: int) -> None:
    report = await Load(unused_tcp_port, request()).at_rate(500.0, 3, Random(0))
    assert (report.answered, report.failed) == (0, 3)


def test_sizes_that_are_no_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overhead.main(["--replicas", "8,many"])
    assert "8,many" in capsys.readouterr().err


@pytest.mark.process
def test_it_measures_envoy_alone_a_server_that_does_nothing_and_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead, "WARM_UP_S", 0.1)
    monkeypatch.setattr(overhead, "HELD_S", 0.5)
    report = tmp_path / "overhead.json"
    arguments = ["--replicas", "1,3", "--seconds", "0.3", "--in-flight", "30"]
    page = tmp_path / "report" / "index.html"
    assert overhead.main([*arguments, "--json", str(report), "--report", str(page.parent)]) == 0
    figures = json.loads(report.read_text())["setups"]
    names = [one["name"] for one in figures]
    assert names == [
        "Envoy alone",
        "+ do-nothing ext_proc",
        "+ router, 1 replica",
        "+ router, 3 replicas",
    ]
    for one in figures:
        assert one["rate"]["answered"] == 90
        assert one["at_once"]["most_at_once"] == 64
        assert one["held"]["most_at_once"] == 30
    assert all(one["cpu_us"] > 0 for one in figures[1:])
    assert all(name in page.read_text() for name in names)
    assert len(capsys.readouterr().out.splitlines()) == 4 + len(figures) + 1
