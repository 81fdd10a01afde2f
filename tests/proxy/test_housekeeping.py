"""Figures that a router updates every second."""

import asyncio
import logging
from contextlib import suppress
from socket import gethostname
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from extproc.fleet.digest import NOTHING, Digest, DigestKind
from extproc.predict.step import hardware_profile
from extproc.proxy.app import build
from extproc.proxy.housekeeping import Housekeeping
from extproc.proxy.services import Services
from tests.fakes import ManualClock, chat, replica
from tests.large import assert_event_loop_is_free, thousand_states
from tests.proxy.conftest import config_of, put_replicas, router_of, samples


async def one_pass(*pools: Services) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.0):  # until the first wait
            await Housekeeping(pools).run()


@pytest.mark.parametrize(
    ("serve", "external"),
    [({}, {("default",): 3.0}), ({"mode": "observe"}, {}), ({"share": 0.5}, {})],
)
async def test_external_load_is_a_figure_of_routers_that_route_every_request(
    serve: dict[str, Any], external: dict[tuple[str, ...], float]
) -> None:
    services = router_of(config_of(serve=serve))
    for later in (1.0, 2.0):  # load counts from the second poll on
        put_replicas(services, 1, running=3, steps=later, scraped_at=services.wall() + later)
    await one_pass(services)
    assert samples(services.metrics.external_requests) == external


OTHER = "10.0.0.2:50051:1f"
EXTERNAL_CASES = {
    "sent by no router": ((1, 2, 3, 4), {}, 3.0),
    "figures do not move": ((1, 1, 1, 1), {}, 0.0),
    "another router is late": ((1, 2, 3, 4), {0: OTHER}, 0.0),
    "another router is lost": ((1, 2, 3, 4), {0: OTHER, 2: "own"}, 3.0),
}


@pytest.mark.parametrize(
    ("steps", "digests", "external"), EXTERNAL_CASES.values(), ids=EXTERNAL_CASES
)
async def test_external_load_needs_fresh_polls_and_fresh_digests_of_all_routers(
    steps: tuple[float, ...], digests: dict[int, str], external: float
) -> None:
    """``steps`` of the replica at each poll, a second apart; ``digests``: poll → router."""
    clock = ManualClock(1000.0)
    services = build(config_of(), CollectorRegistry(), clock, clock)
    put_replicas(services, 1)
    services.fleet.dispatch(replica(1), chat(100, 1000))
    for number, made in enumerate(steps):
        clock.advance(1.0)
        if name := digests.get(number, "").replace("own", services.fleet.router):
            digest = Digest(name, 1, clock(), DigestKind.WHOLE, (), NOTHING)
            services.fleet.receive_digest(digest)
        put_replicas(services, 1, running=4, steps=made)
        await one_pass(services)
    assert bool(services.routers.lost) is (len(digests) == 2)
    assert samples(services.metrics.external_requests) == {("default",): external}


async def test_sleeping_replica_is_not_counted_as_healthy() -> None:
    services = router_of(config_of())
    put_replicas(services, 1)
    for number, figure in enumerate(("asleep", "healthy", "ready"), start=2):
        put_replicas(services, number, **{figure: figure == "asleep"})
    await one_pass(services)
    counts = {("healthy",): 1, ("asleep",): 1, ("unhealthy",): 2}
    assert samples(services.metrics.replicas) == counts


@pytest.mark.parametrize(
    ("pollers", "listed", "age_s"),
    [({"a:1": ()}, (), 0.0), ({"a:1": ()}, (replica(2),), 60.0), ({}, (), 60.0), (None, (), 60.0)],
)
async def test_state_of_a_pool_does_not_age_while_its_pollers_list_no_replica(
    pollers: dict[str, tuple[str, ...]] | None, listed: tuple[str, ...], age_s: float
) -> None:
    clock = ManualClock(1000.0)
    services = build(config_of(), CollectorRegistry(), clock, clock)
    put_replicas(services, 1)
    services.fleet.remove(replica(1))
    services.fleet.pollers = pollers
    services.fleet.listed(listed)
    clock.advance(60.0)
    await one_pass(services)
    assert samples(services.metrics.state_age) == {(): age_s}


async def test_requests_in_flight_are_counted_at_the_time_of_the_scrape() -> None:
    services = router_of(config_of())
    put_replicas(services, 1)
    await one_pass(services)
    services.fleet.dispatch(replica(1), chat(100, 10))
    assert samples(services.metrics.in_flight) == {(): 1}


async def test_other_router_is_known_by_host_and_port(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    services = router_of(config_of())
    await one_pass(services)
    other = router_of(config_of(serve={"listen": "127.0.0.1:50077"})).fleet
    services.fleet.receive_digest(Digest(other.router, 1, 0.0, DigestKind.WHOLE, (), NOTHING))
    await one_pass(services)
    (record,) = caplog.records
    assert record.message == "routers joined or left the pool"
    assert vars(record)["joined"] == f"{gethostname()}:50077"


@pytest.mark.parametrize("says_farewell", [False, True])
async def test_router_that_left_is_lost_unless_it_said_farewell(says_farewell: bool) -> None:
    clock = ManualClock(1000.0)
    services = build(config_of(), CollectorRegistry(), clock, clock)
    kinds = DigestKind.WHOLE, *([DigestKind.FAREWELL] if says_farewell else [])
    for number, kind in enumerate(kinds, start=1):
        digest = Digest("10.0.0.2:50051:1f", number, clock(), kind, (), NOTHING)
        services.fleet.receive_digest(digest)
        await one_pass(services)
    clock.advance(2.0)
    own = Digest(services.fleet.router, 1, clock(), DigestKind.WHOLE, (), NOTHING)
    services.fleet.receive_digest(own)
    await one_pass(services)
    lost = ["10.0.0.2:50051"] if not says_farewell else []
    assert [each.partition(" ")[0] for each in services.routers.lost] == lost


async def test_poller_that_left_is_lost_unless_it_said_farewell() -> None:
    services = router_of(config_of())
    for alive, stopped in (({"a:1": (), "b:1": (), "c:1": ()}, ()), ({"c:1": ()}, {"a:1:x"})):
        services.fleet.pollers, services.fleet.stopped_pollers = alive, stopped
        await one_pass(services)
    assert [each.partition(" ")[0] for each in services.pollers.lost] == ["b:1"]


async def test_failures_of_replicas_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    services = router_of(config_of(), 1)
    other = services.of_pool(services.config.model_copy(update={"pool": "batch"}))
    put_replicas(other, 2)
    for number in (1, 2, 3):
        services.metrics.failures.add(replica(number), by=number)
    await one_pass(services, other)
    (record,) = caplog.records
    assert record.message == "requests failed on replicas: read the log of each replica"
    pool = services.config.pool
    assert vars(record)[f"r1 ({replica(1)}) of pool {pool}"] == 1
    assert vars(record)[f"r2 ({replica(2)}) of pool batch"] == 2
    assert replica(3) not in vars(record)  # the replica left, and its counter with it
    await one_pass(services)
    assert vars(caplog.records[-1])[f"r1 ({replica(1)})"] == 1


async def test_refusals_are_logged_unless_the_client_is_to_blame(
    caplog: pytest.LogCaptureFixture,
) -> None:
    services = router_of(config_of(), 1)
    for reason in ("saturated", "model_not_found", "body_too_large"):
        services.metrics.refused.add(reason)
    await one_pass(services)
    (record,) = caplog.records
    assert record.message.startswith("requests refused: ")
    assert vars(record).keys() & {"saturated", "model_not_found", "body_too_large"} == {"saturated"}


async def test_gauges_that_do_not_move_are_a_figure() -> None:
    clock = ManualClock()
    services = build(config_of(), CollectorRegistry(), clock, clock)
    for _ in range(5):
        clock.advance(1.0)
        put_replicas(services, 1, running=3, steps=5.0)
    await one_pass(services)
    assert samples(services.metrics.frozen) == {(replica(1),): 1.0}


async def test_gauges_of_a_large_fleet_do_not_delay_requests() -> None:
    services, learned = router_of(config_of()), hardware_profile("llama-8b-a10").step
    for state in thousand_states():
        services.fleet.put(structs.replace(state, learned=learned, measured=True))

    async def work() -> None:
        await asyncio.sleep(0)  # so that the pass is measured
        await one_pass(services)

    await work()
    await assert_event_loop_is_free(work)
