"""The page, its news and its decisions over HTTP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urljoin

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from extproc.clock import Clock, monotonic
from extproc.dashboard.routes import page_routes
from extproc.explain.records import read_records
from extproc.explain.show import comparison
from extproc.observe.admin import serve_admin
from extproc.server.admin import admin_routes
from extproc.server.app import apply
from extproc.server.services import Services
from extproc.store.replicas import Snapshot
from tests.fakes import chat
from tests.large import A_FEW_MS, REPLICAS, longest_piece, thousand
from tests.waiting import PATIENCE_S

SCRIPTS = ("app", "ask", "decisions", "elements", "scatter", "sections")
FILES = {
    "/": "text/html",
    "/dashboard/style.css": "text/css",
    **{f"/dashboard/{name}.js": "text/javascript" for name in SCRIPTS},
}


@pytest.fixture
def clock() -> Clock:
    return monotonic


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


async def test_all_who_look_share_one_snapshot_a_tick(client: aiohttp.ClientSession) -> None:
    async def look() -> list[dict[str, Any]]:
        async with client.get("/dashboard/events") as response:
            assert response.content_type == "text/event-stream"
            assert "Content-Security-Policy" in response.headers
            return await news(response, 3)

    seen = await asyncio.gather(*(look() for _ in range(5)))
    assert seen[0][0]["pools"][0]["replicas"]["name"] == ["r1", "r2", "r3", "r4"]
    assert all(len({one["at"] for one in each}) == 3 for each in seen)
    assert len({one["at"] for each in seen for one in each}) <= 4


async def test_a_large_fleet_is_shown_without_holding_requests_up(
    client: aiohttp.ClientSession, services: Services
) -> None:
    await apply(Snapshot(thousand()), services.fleet)
    for number in range(50):
        decision = services.router.decide(chat(500, 200))
        assert decision is not None
        services.log.add(f"request-{number}", services.wall(), decision)
    async with longest_piece() as longest, client.get("/dashboard/events") as response:
        found = await news(response, 2)
    assert len(found[-1]["pools"][0]["replicas"]["replica"]) == REPLICAS + 4
    assert longest[0] < A_FEW_MS


async def test_a_decision_is_compared_in_the_words_of_explain(
    client: aiohttp.ClientSession, services: Services
) -> None:
    decision = services.router.decide(chat(1234, 50))
    assert decision is not None
    record = services.log.add("the-id", services.wall(), decision)
    async with client.get("/dashboard/decision", params={"number": "1"}) as response:
        shown = await response.json()
    text = comparison(read_records([record.to_json()])[0])
    assert shown["facts"]["request"] == "the-id"
    for name, value in shown["facts"].items():
        assert " ".join(f"{name} {value}".split()) in " ".join(text.split())
    for row in shown["rows"]:
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


async def test_nothing_can_be_changed(client: aiohttp.ClientSession) -> None:
    for path in (*FILES, "/dashboard/events", "/dashboard/decision"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with client.request(method, path) as response:
                assert response.status == 405
