"""Format version of the JSON that a router's admin address serves: commands of another version."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from typing import Any

import pytest
from aiohttp import ClientSession, web
from msgspec.json import decode, encode
from prometheus_client import CollectorRegistry

from extproc.observe.admin import serve_admin
from extproc.observe.dashboard.snapshot import snapshot
from extproc.observe.decision import FORMAT
from extproc.proxy.services import Services
from tests.conftest import Cli
from tests.fakes import chat
from tests.observe.conftest import decide

JSON = dict[str, Any]


def fields(value: object, at: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield f"{at}.{name}"
            yield from fields(each, f"{at}.{name}")
    elif isinstance(value, list):
        for each in value:
            yield from fields(each, at)


async def test_format_rises_with_each_change_of_a_field(services: Services, router: str) -> None:
    decide(services)
    found = {*fields(decode(encode(await snapshot([services]))), "events")}
    async with ClientSession(f"http://{router}") as session:
        for path in ("/decisions", "/fleet"):
            async with session.get(path) as response:
                found |= {*fields(await response.json(), path)}
    assert {"events.version", "/decisions.version", "/fleet.version"} <= found
    digest = sha256("\n".join(sorted(found)).encode()).hexdigest()[:12]
    remedy = "add 1 to FORMAT of observe/decision.py, and write the new digest here"
    assert (FORMAT, digest) == (2, "bc14cb138476"), remedy


def of_router(decision: JSON, page: JSON) -> AbstractAsyncContextManager[str]:
    async def decisions(_: web.Request) -> web.Response:
        return web.json_response([decision])

    async def events(_: web.Request) -> web.Response:
        text = f"data: {json.dumps(page)}\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    routes = [web.get("/decisions", decisions), web.get("/dashboard/events", events)]
    return serve_admin("127.0.0.1:0", CollectorRegistry(), routes)


def older(value: Any, names: set[str]) -> Any:
    """JSON of an older router: without version, and only with the fields in ``names``."""
    return {name: each for name, each in value.items() if name in names}


def newer(value: Any) -> Any:
    """JSON of a newer router: each object has a field more."""
    if isinstance(value, list):
        return [newer(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: newer(each) for name, each in value.items()} | {"added": [1]}


@pytest.fixture
async def written(services: Services) -> tuple[JSON, JSON]:
    """A decision and a snapshot, as this version writes them."""
    record = decide(services, chat(1234, 50), "the-id").record()
    return decode(encode(record)), decode(encode(await snapshot([services])))


REMARK = f"the router has another version (format {{}}, here {FORMAT}): fields that only one of"


EXPLAIN = pytest.mark.parametrize("arguments", [("explain",), ("explain", "the-id")])


async def assert_explained(decision: JSON, arguments: tuple[str, ...], cli: Cli) -> None:
    """Run ``extproc explain`` beside a router of another format; it shows the decision and says
    so."""
    async with of_router(decision, {}) as address:
        printed, (line,) = await asyncio.to_thread(cli, *arguments, "--router", address)
    assert "the-id" in "\n".join(printed)
    assert line.startswith(f"extproc explain: {REMARK.format(decision.get('version', 0))}")


@EXPLAIN
async def test_explain_of_older_router_shows_what_both_know(
    written: tuple[JSON, JSON], arguments: tuple[str, ...], cli: Cli
) -> None:
    decision = older(written[0], {"number", "request_id", "decided_at", "replica", "candidates"})
    assert "version" not in decision
    for candidate in decision["candidates"]:
        del candidate["kv_usage"], candidate["terms_s"]["avoidable"]
    await assert_explained(decision, arguments, cli)


@EXPLAIN
async def test_explain_of_newer_router_shows_what_both_know(
    written: tuple[JSON, JSON], arguments: tuple[str, ...], cli: Cli
) -> None:
    decision = newer(written[0]) | {"version": FORMAT + 1}
    del decision["policy"]
    await assert_explained(decision, arguments, cli)


async def test_json_of_another_version_stays_json(written: tuple[JSON, JSON], cli: Cli) -> None:
    async with of_router(newer(written[0]) | {"version": FORMAT + 1}, {}) as address:
        printed, _ = await asyncio.to_thread(cli, "explain", "--json", "--router", address)
    (record,) = json.loads("\n".join(printed))
    assert record["version"] == FORMAT + 1


async def test_top_of_older_router_shows_what_both_know(
    written: tuple[JSON, JSON], cli: Cli
) -> None:
    page = older(written[1], {"router", "warnings", "pools"})
    (pool,) = page["pools"]
    del pool["waiting"], pool["accuracy"], pool["replicas"]["note"]
    columns = pool["replicas"]["columns"]
    columns[:] = [column for column in columns if column["title"] != "Backlog"]
    async with of_router({}, page) as address:
        printed, _ = await asyncio.to_thread(cli, "top", "--router", address)
    output = "\n".join(printed)
    assert f"! {REMARK.format(0)}" in output
    assert "\nr1 " in output


async def test_top_of_newer_router_shows_what_both_know(
    written: tuple[JSON, JSON], cli: Cli
) -> None:
    page = newer(written[1]) | {"version": FORMAT + 1}
    del page["history"], page["facts"]
    (pool,) = page["pools"]
    column = {"title": "Colour", "unit": "hue", "values": ["red"] * 4}
    pool["replicas"]["columns"].insert(1, column)
    async with of_router({}, page) as address:
        printed, _ = await asyncio.to_thread(cli, "top", "--router", address)
    output = "\n".join(printed)
    assert f"! {REMARK.format(FORMAT + 1)}" in output
    assert "Colour" in output
    assert "\nr1 " in output
