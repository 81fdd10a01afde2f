"""``extproc serve``: the router's parts, put together and run."""

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.fleet.members import ModelNames
from extproc.ground.clock import monotonic, wall
from extproc.ground.outage_log import OutageLog
from extproc.observe.admin import serve_admin
from extproc.observe.dashboard.routes import page_routes
from extproc.observe.decision_log import DecisionLog
from extproc.observe.metrics import RouterMetrics
from extproc.observe.traces import Traces
from extproc.poll.destination import IntoFleet
from extproc.poll.discovery import names_replicas
from extproc.poll.poller import Poller
from extproc.poll.scrape import PollMetrics
from extproc.proxy.admin import admin_routes, readiness
from extproc.proxy.service import GrpcServer
from extproc.proxy.services import Services, chunk_budget, parts_of_pool
from extproc.proxy.sharing import share
from extproc.replica_state import TTL_S
from extproc.request.tokens import TokenCounter
from extproc.route.queue import SWEEP_EVERY_S
from extproc.share.connection import connect
from extproc.share.envelope import Skips
from extproc.share.lists import Put
from extproc.share.replicas import Change, Removed, Snapshot, StateReader

logger = logging.getLogger(__name__)

_HOUSEKEEPING_EVERY = 1.0  # seconds


async def run_router(config: Config) -> None:
    """Runs a router until SIGTERM or SIGINT, then lets open streams end.

    Raises:
        OSError: an address cannot be listened on.
        ValueError: the configuration names a tokenizer that does not exist, or no
            replicas where it is the router that polls them; or traces, where OpenTelemetry is
            not installed.
    """
    if config.state == "memory" and not names_replicas(config):
        raise ValueError("no replicas to poll: configure 'replicas' or 'replicas_file'")
    registry = CollectorRegistry()
    services = build(config, registry)
    others = {one.pool: services.of_pool(one) for one in config.each_pool[1:]}
    pools = (services, *others.values())
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server = GrpcServer(services, others)
    async with (
        serve_admin(
            config.serve.admin,
            registry,
            admin_routes(*pools),
            page_routes(),
            config.admin,
            ready=readiness(pools, stopping),
        ) as admin,
        _background(
            (
                server.look_after(),
                dispatch_queued(pools),
                _states(pools, registry),
                _housekeeping(pools),
            ),
            stopping,
        ) as tasks,
    ):
        port = await server.start(config.serve.listen)
        names = ", ".join(one.config.pool for one in pools)
        logger.info("router ready", extra={"port": port, "admin": admin, "pool": names})
        gc.collect()
        gc.freeze()  # what is loaded by now is never garbage: to go through it takes 15 ms
        await stopping.wait()
        logger.info("stopping", extra={"in_flight": sum(one.fleet.in_flight for one in pools)})
        await server.stop(config.serve.drain_s)
        if services.traces is not None:
            await asyncio.to_thread(services.traces.close)
    for task in tasks:
        if not task.cancelled():
            task.result()


def build(config: Config, registry: CollectorRegistry) -> Services:
    """Builds the parts of a router from its configuration.

    Raises:
        ValueError: as :func:`run_router`.
    """
    random, names = Random(config.route.seed), ModelNames(config.route.models)
    return Services(
        **parts_of_pool(config, names, random, monotonic, wall),
        tokens=TokenCounter(config.request),
        log=DecisionLog(config.serve.decisions_kept),
        metrics=RouterMetrics(registry),
        clock=monotonic,
        wall=wall,
        random=random,
        chunks=chunk_budget(config.serve.chunks_per_s),
        traces=Traces(endpoint) if (endpoint := config.traces.endpoint) else None,
    )


async def _states(pools: Sequence[Services], registry: CollectorRegistry) -> None:
    """What tells the fleets of replicas and other routers: Redis, or pollers in this process. And
    what writes down what comes of it."""
    if pools[0].config.state == "redis":
        parts = [follow_state(one.config, one.fleet, Skips(one.metrics.skipped)) for one in pools]
        parts += [share(one.config, one.fleet, one.metrics) for one in pools]
    else:
        metrics = PollMetrics(registry)
        parts = [Poller(one.config, IntoFleet(one.fleet), metrics, Random()).run() for one in pools]
    parts += [one.recorder.run() for one in pools if one.recorder]
    async with asyncio.TaskGroup() as tasks:  # at the end it waits for each, farewells included
        for part in parts:
            tasks.create_task(part)


async def follow_state(config: Config, fleet: Fleet, skips: Skips | None = None) -> None:
    """Brings every change that pollers write into the fleet, for ever."""
    async with connect(config.redis, config.pool) as redis:
        reader = StateReader(redis, config.pool, Random(), skips)
        async with aclosing(reader.changes()) as changes:
            async for change in changes:
                await apply(change, fleet)


async def apply(change: Change, fleet: Fleet) -> None:
    """One change of the shared state, brought into the fleet, replica by replica: a message or a
    snapshot tells of many, and requests come first."""
    match change:
        case Snapshot(states, ages):
            # A Redis that was just started holds few of them yet: what is missing is dropped
            # only when it stays silent. Those not measured first: at a router's start they are no
            # newcomers among the others.
            for state in sorted(states, key=lambda state: state.measured):
                fleet.put(state, age=ages.get(state.id, 0.0))
                await asyncio.sleep(0)
            fleet.members_known.set()
        case Put(state):
            # Pushed at once: it took less than the clocks of two machines differ by.
            fleet.put(state)
        case Removed(replica):
            fleet.remove(replica)
    await asyncio.sleep(0)


async def _housekeeping(pools: Sequence[Services]) -> None:
    metrics, clock, fleets = pools[0].metrics, pools[0].clock, [one.fleet for one in pools]
    while True:
        for one in pools:
            one.fleet.drop_stale(TTL_S)
            needed = one.demand.replicas(one.queue, 1 + len(one.fleet.peers))
            metrics.replicas_needed.labels(one.config.pool).set(needed)
        states = [state for fleet in fleets for state in fleet.members]
        metrics.drop_other_replicas({state.id for state in states})
        metrics.set_excluded(one for fleet in fleets for one in fleet.eligibility.exclusions())
        healthy = sum(state.healthy for state in states)
        metrics.replicas.labels("healthy").set(healthy)
        metrics.replicas.labels("unhealthy").set(len(states) - healthy)
        held = [(*kind, count) for one in pools for kind, count in one.queue.sizes().items()]
        got = [pair for one in pools for pair in one.queue.shares().items()]
        metrics.set_waiting(held, got)
        metrics.set_unserved({one.config.pool: one.queue.unserved_by_model() for one in pools})
        metrics.in_flight.set(sum(fleet.in_flight for fleet in fleets))
        metrics.known_blocks.set(sum(fleet.blocks.count_known() for fleet in fleets))
        metrics.other_routers.set(max(len(fleet.peers) for fleet in fleets))
        # Of a pool that never had a replica there is no news.
        heard = [fleet for fleet in fleets if fleet.members] or fleets[:1]
        oldest = min(fleet.eligibility.staleness.heard_at for fleet in heard)
        metrics.state_age.set(clock() - oldest)
        await asyncio.sleep(_HOUSEKEEPING_EVERY)


async def dispatch_queued(pools: Sequence[Services]) -> None:
    """Lets queued requests go when a poll or another router told of room; for ever.

    An unforeseen error is logged; other pools, and requests in flight, go on.
    """
    begins, over = "queued requests cannot be looked at, retrying", "queued requests are looked at"
    outages = [OutageLog(logger, begins, over, pool=one.config.pool) for one in pools]
    while True:
        for one, outage in zip(pools, outages, strict=True):
            try:
                one.queue.sweep()
                outage.recovered()
            except Exception as error:  # unforeseen: it must not end the router
                outage.failed(error, traceback=error)
        await asyncio.sleep(SWEEP_EVERY_S)


@asynccontextmanager
async def _background(
    parts: Iterable[Coroutine[Any, Any, None]], stopping: asyncio.Event
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Runs parts of the router beside the rest; should one end, the router stops."""
    tasks = [asyncio.create_task(part) for part in parts]
    for task in tasks:
        task.add_done_callback(lambda _: stopping.set())
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
