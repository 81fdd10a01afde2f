"""Pages of the admin address for a large fleet."""

import asyncio
import json
import threading
import urllib.request
from typing import Any

import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry, Gauge

from extproc.ground.runtime import in_turns
from extproc.observe.admin import serve_admin
from extproc.observe.metrics import RouterMetrics
from extproc.proxy.admin import admin_routes
from extproc.proxy.headers import inference_headers
from extproc.proxy.services import Services
from extproc.proxy.sharing import apply
from extproc.share.replicas import Snapshot
from tests.fakes import ManualClock, chat, fleet_of
from tests.large import REPLICAS, assert_event_loop_is_free, thousand_states
from tests.proxy.conftest import on_fleet

DECISIONS = 60
PAGE = 50


@pytest.fixture
async def large(services: Services) -> Services:
    """A router with a thousand replicas and some decisions. Its clock stands still: on a busy
    machine the first replicas would otherwise be stale before the last are added."""
    clock = ManualClock()
    services = on_fleet(services, fleet_of(clock), clock=clock)
    await in_turns(apply(services.fleet, Snapshot(thousand_states())))
    for number in range(DECISIONS):
        decision = services.router.decide(chat(500, 200))
        assert decision is not None
        services.fleet.dispatch(decision.replica, decision.profile)
        services.log.add(f"request-{number}", 1.0, decision)
    return services


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url) as response:
        return bytes(response.read())


async def get(services: Services, path: str) -> Any:
    """Fetches the page in another thread, whose work does not delay the router's loop."""
    async with serve_admin("127.0.0.1:0", CollectorRegistry(), admin_routes(services)) as address:
        await assert_event_loop_is_free(lambda: asyncio.to_thread(fetch, f"http://{address}{path}"))
        return json.loads(await asyncio.to_thread(fetch, f"http://{address}{path}"))


async def test_decisions_of_large_fleet_do_not_delay_requests(large: Services) -> None:
    shown = await get(large, "/decisions")
    assert [record["request_id"] for record in shown] == [
        f"request-{number}" for number in range(DECISIONS - PAGE, DECISIONS)
    ]
    for record in shown:
        assert record["compared"] == REPLICAS
        assert 20 <= len(record["candidates"]) <= 21
        assert record["replica"] in {candidate["replica"] for candidate in record["candidates"]}
    assert await get(large, "/decisions?last=3") == shown[-3:]
    assert await get(large, "/decisions?after=0") == (await get(large, "/decisions?after=0"))[:PAGE]


async def test_metrics_of_large_fleet_do_not_delay_requests(registry: CollectorRegistry) -> None:
    metrics = RouterMetrics(registry)
    for state in thousand_states():
        metrics.decisions.add("completion", state.id)
        for counts in (metrics.failures, metrics.hits_expected, metrics.hits_reported):
            counts.add(state.id)
    async with serve_admin("127.0.0.1:0", registry) as address:
        url = f"http://{address}/metrics"
        await assert_event_loop_is_free(lambda: asyncio.to_thread(fetch, url))


async def test_gauges_are_read_in_the_thread_that_changes_their_figures(
    registry: CollectorRegistry,
) -> None:
    """Gauges of a poller go through its replicas, which may join or leave meanwhile."""
    Gauge("thread", "", registry=registry).set_function(threading.get_ident)
    async with serve_admin("127.0.0.1:0", registry) as address:
        page = await asyncio.to_thread(fetch, f"http://{address}/metrics")
    assert float(page.split()[-1]) == threading.get_ident()


async def test_decision_by_request_id_shows_all_candidates(large: Services) -> None:
    (shown,) = await get(large, "/decisions?request_id=request-7")
    assert len(shown["candidates"]) == REPLICAS
    assert await get(large, "/decisions?request_id=nobody") == []


async def test_decision_is_found_by_a_longer_request_id_than_the_record_keeps(
    services: Services,
) -> None:
    long_id, decision = "a" * 200, services.router.decide(chat(500, 200))
    headers = {":method": "POST", ":path": "/v1/completions", "x-request-id": long_id}
    request = inference_headers(headers, services.config)
    assert request
    assert decision
    services.log.add(request.request_id, 1.0, decision)
    (shown,) = await get(services, f"/decisions?request_id={long_id}")
    assert shown["request_id"] == long_id[:128]


async def test_fleet_page_of_large_fleet_does_not_delay_requests(large: Services) -> None:
    shown = await get(large, "/fleet")
    assert shown["in_flight"] == DECISIONS
    assert len(shown["replicas"]) == REPLICAS
    assert sum(replica["in_flight"] for replica in shown["replicas"]) == DECISIONS
    assert {replica["pool"] for replica in shown["replicas"]} == {"default"}


async def test_fleet_page_survives_replicas_that_leave(large: Services) -> None:
    routes = admin_routes(large)
    async with (
        serve_admin("127.0.0.1:0", CollectorRegistry(), routes) as address,
        ClientSession() as session,
        session.get(f"http://{address}/fleet") as response,
    ):
        for state in [*large.fleet.members][-10:]:
            large.fleet.remove(state.id)
        shown = await response.json()
    assert shown["in_flight"] == DECISIONS
    assert len(shown["replicas"]) == REPLICAS
