"""The page, its news and its decisions over HTTP."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from extproc.config import AdminSettings
from extproc.ground.address import split_address
from extproc.ground.clock import Clock
from extproc.observe import dashboard
from extproc.observe.admin import serve_admin
from extproc.observe.dashboard import routes
from extproc.observe.dashboard.routes import Live, page_routes
from extproc.observe.decision_log import PredictionResult
from extproc.observe.explain import comparison
from extproc.proxy.admin import admin_routes
from extproc.proxy.app import apply
from extproc.proxy.services import Services
from extproc.share.replicas import Snapshot
from tests.fakes import chat, replica
from tests.large import REPLICAS, hold_nobody_up, thousand
from tests.waiting import PATIENCE_S, until

KINDS = {".css": "text/css", ".js": "text/javascript"}
FILES = {"/": "text/html"} | {
    f"/dashboard/{file.name}": KINDS[file.suffix]
    for file in Path(dashboard.__file__).parent.glob("page/*.*s*")
    if file.suffix in KINDS
}


@pytest.fixture
async def client(services: Services) -> AsyncIterator[aiohttp.ClientSession]:
    """Asks the admin address of a router."""
    routes = admin_routes(services)
    async with (
        serve_admin("127.0.0.1:0", CollectorRegistry(), routes, page_routes()) as address,
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        yield session


async def news(response: aiohttp.ClientResponse, events: int) -> list[dict[str, Any]]:
    """The first so many events."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < events:
            line = await response.content.readuntil(b"\n\n")
            assert line.startswith(b"data: ")
            found.append(json.loads(line.removeprefix(b"data: ")))
    return found


@pytest.mark.parametrize("path", FILES)
async def test_the_page_may_load_only_its_own_files(
    client: aiohttp.ClientSession, path: str
) -> None:
    async with client.get(path) as response:
        assert (response.status, response.content_type) == (200, FILES[path])
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "frame-ancestors 'none'" in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        text = await response.text()
    assert not re.search(r"https?://", text)
    named = re.findall(r'(?:src|href|from)[= ]"([^"#]+)"', text)
    assert {urljoin(path, name) for name in named if name != "data:,"} <= {*FILES}
    assert named or path != "/"


async def test_all_who_look_share_the_same_snapshots(services: Services) -> None:
    live = Live([services])
    viewers = [live.frames() for _ in range(3)]
    first, second = [{*await asyncio.gather(*map(anext, viewers))} for _ in range(2)]
    assert (len(first), len(second)) == (1, 1)
    assert first != second


async def test_the_news_are_events_and_no_other_site_reads_them(
    client: aiohttp.ClientSession,
) -> None:
    async with client.get("/dashboard/events") as response:
        assert response.content_type == "text/event-stream"
        assert "Content-Security-Policy" in response.headers
        for told in await news(response, 2):
            names = told["pools"][0]["replicas"]["columns"][0]["values"]
            assert names == ["r1", "r2", "r3", "r4"]


async def test_what_is_beyond_all_figures_is_null(
    client: aiohttp.ClientSession, services: Services, clock: Clock
) -> None:
    for predicted in (inf, 1.0):
        services.accuracy.add(PredictionResult(clock(), replica(1), predicted, 2.0, 0.0, None))
    async with client.get("/dashboard/events") as response:
        (told,) = await news(response, 1)
    accuracy = told["pools"][0]["accuracy"]
    assert [predicted for predicted, _ in accuracy["points"]] == [1.0, None]
    assert accuracy["quantiles"] == [2.0, 2.0, 2.0]


async def test_the_news_end_when_the_token_is_another_one(
    services: Services, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("an-example")
    access, shown = AdminSettings(token_file=file), {"Authorization": "Bearer an-example"}
    serving = serve_admin("127.0.0.1:0", CollectorRegistry(), admin_routes(services), access=access)
    async with (
        serving as address,
        aiohttp.ClientSession(f"http://{address}", headers=shown) as client,
        client.get("/dashboard/events") as response,
    ):
        await news(response, 1)
        file.write_text("another-one")
        async with asyncio.timeout(PATIENCE_S):
            await response.read()


async def test_who_takes_nothing_is_given_up_and_leaves_its_place(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "EVERY_S", 0.01)
    monkeypatch.setattr(routes, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(routes, "_MOST_VIEWERS", 1)
    await apply(Snapshot(thousand()), services.fleet)
    serving = serve_admin("127.0.0.1:0", CollectorRegistry(), admin_routes(services))
    async with serving as address, aiohttp.ClientSession(f"http://{address}") as client:

        async def alone() -> bool:
            """Whether there is a place, and then none for another."""
            async with (
                client.get("/dashboard/events") as one,
                client.get("/dashboard/events") as two,
            ):
                return (one.status, two.status) == (200, 503)

        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.connect(split_address(address))
            stuck.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: here\r\n\r\n")
            assert await asyncio.to_thread(stuck.recv, 15) == b"HTTP/1.1 200 OK"
            await until(alone)


async def test_a_large_fleet_is_shown_without_holding_requests_up(
    client: aiohttp.ClientSession, services: Services
) -> None:
    await apply(Snapshot(thousand()), services.fleet)
    for number in range(50):
        decision = services.router.decide(chat(500, 200))
        assert decision is not None
        services.log.add(f"request-{number}", services.wall(), decision)

    async def look() -> None:
        async with client.get("/dashboard/events") as response:
            found = await news(response, 2)
        assert len(found[-1]["pools"][0]["replicas"]["keys"]) == REPLICAS + 4

    await hold_nobody_up(look)


async def test_a_decision_is_compared_in_the_words_of_explain(
    client: aiohttp.ClientSession, services: Services
) -> None:
    decision = services.router.decide(chat(1234, 50))
    assert decision is not None
    record = services.log.add("the-id", services.wall(), decision)
    async with client.get("/dashboard/decision", params={"number": "1"}) as response:
        shown = await response.json()
    text = comparison(record.record())
    assert shown["facts"][0] == ["request", "the-id"]
    for name, value in shown["facts"]:
        assert " ".join(f"{name} {value}".split()) in " ".join(text.split())
    for row in zip(*(one["values"] for one in shown["candidates"]["columns"]), strict=True):
        assert " ".join(row).split() in [line.split() for line in text.splitlines()]
    assert all(line in text for line in shown["legend"])


@pytest.mark.parametrize(
    ("number", "status"), [("2", 404), ("0", 404), ("", 400), ("x", 400), ("1" * 99, 400)]
)
async def test_a_decision_that_is_not_there(
    client: aiohttp.ClientSession, number: str, status: int
) -> None:
    async with client.get("/dashboard/decision", params={"number": number}) as response:
        assert response.status == status


@pytest.mark.parametrize("path", ["/dashboard/events", "/decisions", "/fleet"])
async def test_what_is_made_piece_by_piece_has_no_head_alone(
    client: aiohttp.ClientSession, path: str
) -> None:
    async with client.head(path) as response:
        assert response.status == 405


async def test_nothing_can_be_changed(client: aiohttp.ClientSession) -> None:
    for path in (*FILES, "/dashboard/events", "/dashboard/decision"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with client.request(method, path) as response:
                assert response.status == 405
