"""The page and its data over HTTP: files, events, decisions, and refusals."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from aiohttp import ClientResponse, ClientSession

from extproc.config import AdminSettings
from extproc.ground.address import split_address
from extproc.ground.runtime import in_turns
from extproc.observe import dashboard
from extproc.observe.dashboard import routes
from extproc.observe.dashboard.routes import Live
from extproc.observe.explain import comparison
from extproc.proxy.services import Services
from extproc.proxy.sharing import apply
from extproc.share.replicas import Snapshot
from tests.fakes import chat
from tests.large import REPLICAS, assert_event_loop_is_free, thousand_states
from tests.observe.conftest import decide, serving
from tests.observe.dashboard.conftest import ended
from tests.waiting import PATIENCE_S, until

KINDS = {".css": "text/css", ".js": "text/javascript"}
FILES = {"/": "text/html"} | {
    f"/dashboard/{file.name}": KINDS[file.suffix]
    for file in Path(dashboard.__file__).parent.glob("page/*.*s*")
    if file.suffix in KINDS
}


@pytest.fixture
async def client(router: str) -> AsyncIterator[ClientSession]:
    async with ClientSession(f"http://{router}") as session:
        yield session


async def events(response: ClientResponse, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < number:
            line = await response.content.readuntil(b"\n\n")
            assert line.startswith(b"data: ")
            found.append(json.loads(line.removeprefix(b"data: ")))
    return found


@pytest.mark.parametrize("path", FILES)
async def test_page_loads_only_its_own_files(client: ClientSession, path: str) -> None:
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


async def test_viewers_share_the_same_snapshots(services: Services) -> None:
    live = Live([services])
    viewers = [live.frames() for _ in range(3)]
    first, second = [{*await asyncio.gather(*map(anext, viewers))} for _ in range(2)]
    assert (len(first), len(second)) == (1, 1)
    assert first != second


async def test_infinite_figures_are_null(client: ClientSession, services: Services) -> None:
    for predicted in (inf, 1.0):
        ended(services, predicted, 2.0)
    async with client.get("/dashboard/events") as response:
        assert response.content_type == "text/event-stream"
        assert "Content-Security-Policy" in response.headers
        (snapshot,) = await events(response, 1)
    accuracy = snapshot["pools"][0]["accuracy"]
    assert [predicted for predicted, _ in accuracy["points"]] == [1.0, None]
    assert accuracy["quantiles"] == [2.0, 2.0, 2.0]


async def test_events_end_when_the_token_changes(services: Services, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("an-example")
    async with (
        serving(services, AdminSettings(token_file=file)) as address,
        ClientSession(headers={"Authorization": "Bearer an-example"}) as client,
        client.get(f"http://{address}/dashboard/events") as response,
    ):
        await events(response, 1)
        file.write_text("another-one")
        async with asyncio.timeout(PATIENCE_S):
            await response.read()


async def test_viewer_that_reads_nothing_is_disconnected(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "EVERY_S", 0.01)
    monkeypatch.setattr(routes, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(routes, "_MOST_VIEWERS", 1)
    await in_turns(apply(services.fleet, Snapshot(thousand_states())))
    async with serving(services) as address, ClientSession() as client:
        url = f"http://{address}/dashboard/events"

        async def only_place_is_free() -> bool:
            async with client.get(url) as first, client.get(url) as second:
                return (first.status, second.status) == (200, 503)

        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.connect(split_address(address))
            stuck.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: here\r\n\r\n")
            assert await asyncio.to_thread(stuck.recv, 15) == b"HTTP/1.1 200 OK"
            await until(only_place_is_free)


@pytest.mark.slow
async def test_snapshot_of_a_large_fleet_delays_no_request(
    client: ClientSession, services: Services
) -> None:
    await in_turns(apply(services.fleet, Snapshot(thousand_states())))
    for number in range(50):
        decide(services, chat(500, 200), f"request-{number}")

    async def look() -> None:
        async with client.get("/dashboard/events") as response:
            found = await events(response, 2)
        assert len(found[-1]["pools"][0]["replicas"]["keys"]) == REPLICAS + 4

    await assert_event_loop_is_free(look)


async def test_decision_has_the_words_of_explain(client: ClientSession, services: Services) -> None:
    record = decide(services, chat(1234, 50), "the-id")
    async with client.get("/dashboard/decision", params={"number": "1"}) as response:
        shown = await response.json()
    text = comparison(record.record())
    assert shown["facts"][0] == ["request", "the-id"]
    for name, value in shown["facts"]:
        assert " ".join(f"{name} {value}".split()) in " ".join(text.split())
    for row in zip(*(column["values"] for column in shown["candidates"]["columns"]), strict=True):
        assert " ".join(row).split() in [line.split() for line in text.splitlines()]
    assert all(line in text for line in shown["legend"])


WRONG = {"2": 404, "0": 404, "": 400, "x": 400, "1" * 99: 400}
REFUSED = [
    *(("GET", f"/dashboard/decision?number={number}", status) for number, status in WRONG.items()),
    *(("HEAD", path, 405) for path in ("/dashboard/events", "/decisions", "/fleet")),
    *(
        (method, path, 405)  # the page is read-only
        for path in (*FILES, "/dashboard/events", "/dashboard/decision")
        for method in ("POST", "PUT", "DELETE", "PATCH")
    ),
]


async def test_wrong_requests_are_refused(client: ClientSession) -> None:
    for method, path, status in REFUSED:
        async with client.request(method, path) as response:
            assert response.status == status, (method, path)
