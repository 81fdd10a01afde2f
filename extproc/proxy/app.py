"""``extproc serve``: builds the router's parts and runs them."""

import asyncio
import gc
import logging
import signal
from collections.abc import Sequence
from random import Random

from prometheus_client import CollectorRegistry, ProcessCollector

from extproc.config import Config
from extproc.ground.clock import Clock, monotonic, wall
from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import started, together
from extproc.observe.admin import serve_admin
from extproc.observe.dashboard.routes import page_routes
from extproc.observe.decision_log import DecisionLog
from extproc.observe.history import Delays, History
from extproc.observe.metrics import RouterMetrics, build_info
from extproc.observe.traces import Traces
from extproc.poll.destination import IntoFleet
from extproc.poll.discovery import names_replicas
from extproc.poll.poller import Poller
from extproc.poll.scrape import PollMetrics
from extproc.proxy.admin import admin_routes
from extproc.proxy.housekeeping import Housekeeping
from extproc.proxy.service import GrpcServer
from extproc.proxy.services import CHUNKS_SAVED_S, Budget, Services, parts_of_pool
from extproc.proxy.sharing import share
from extproc.request.tokens import TokenCounter
from extproc.route.queue import SWEEP_EVERY_S

logger = logging.getLogger(__name__)

_COLLECT_AFTER = 5_000, 5, 5
"""Thresholds of garbage collection. Requests leave no cycles, and a pass over the young objects of
a thousand requests in flight takes 10 ms: with Python's 700, 3.5% of all CPU time."""


async def run_router(config: Config) -> None:
    """Runs a router until SIGTERM or SIGINT, then lets open streams end.

    Raises:
        OSError: an address cannot be listened on.
        ValueError: a tokenizer does not exist; the router has to poll replicas, but the
            configuration names none; or traces are configured, but OpenTelemetry is not installed.
    """
    if config.state == "memory" and not names_replicas(config):
        raise ValueError("no replicas to poll: configure 'replicas' or 'replicas_file'")
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build_info(registry)
    services = build(config, registry)
    pools = (services, *(services.of_pool(further) for further in config.each_pool[1:]))
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server = GrpcServer(*pools)
    async with (
        serve_admin(
            config.serve.admin,
            registry,
            admin_routes(*pools),
            page_routes(),
            config.admin,
            ready=server.unready,
        ) as admin,
        started(
            server.watch_replicas(),
            dispatch_queued(pools),
            _follow_fleets(pools, registry),
            Housekeeping(pools).run(),
        ) as tasks,
    ):
        for task in tasks:  # until the router stops, none ends unless it fails
            task.add_done_callback(lambda _: stopping.set())
        port = await server.start(config.serve.listen)
        names = ", ".join(pool.config.pool for pool in pools)
        logger.info("router started", extra={"port": port, "admin": admin, "pool": names})
        gc.collect()
        gc.freeze()  # the router's parts live as long as the process
        gc.set_threshold(*_COLLECT_AFTER)
        await stopping.wait()
        in_flight = sum(pool.fleet.in_flight for pool in pools)
        logger.info("router stopping", extra={"in_flight": in_flight})
        await server.stop(config.serve.drain_s)
        if services.traces is not None:
            await asyncio.to_thread(services.traces.close)
    for task in tasks:
        if not task.cancelled():
            task.result()


def build(
    config: Config, registry: CollectorRegistry, clock: Clock = monotonic, wall: Clock = wall
) -> Services:
    """Builds the parts of a router from its configuration.

    Raises:
        OSError, ValueError: as :func:`run_router`.
    """
    random, metrics, request = Random(config.route.seed), RouterMetrics(registry), config.request
    return Services(
        **parts_of_pool(config, random, clock, wall),
        tokens=TokenCounter(request.bytes_per_token, request.image_tokens, request.tokenizers),
        log=DecisionLog(config.serve.decisions_kept),
        metrics=metrics,
        history=History(metrics, clock),
        clock=clock,
        wall=wall,
        delays=Delays(clock),
        random=random,
        chunks=Budget(config.serve.chunks_per_s, CHUNKS_SAVED_S),
        traces=Traces(endpoint) if (endpoint := config.traces.endpoint) else None,
    )


async def _follow_fleets(pools: Sequence[Services], registry: CollectorRegistry) -> None:
    """Runs the tasks that bring replica states into the fleets, from Redis or from pollers in this
    process, and the tasks that record traffic (``record.path``)."""
    if pools[0].config.state == "redis":
        parts = [share(pool.config, pool.fleet, pool.metrics, pool.delays) for pool in pools]
    else:
        metrics = PollMetrics(registry)
        parts = [
            Poller(pool.config, IntoFleet(pool.fleet), metrics, Random()).run() for pool in pools
        ]
    parts += [pool.recorder.run() for pool in pools if pool.recorder]
    await together(*parts)  # if cancelled, waits for farewells


async def dispatch_queued(pools: Sequence[Services]) -> None:
    """Dispatches queued requests when a poll or another router reports room for them.

    Runs until cancelled. An unforeseen error in one pool is logged; the other pools go on.
    """
    begins, over = "dispatch from the queue fails: retrying", "dispatch from the queue works again"
    outages = [OutageLog(logger, begins, over, pool=pool.config.pool) for pool in pools]
    while True:
        for pool, outage in zip(pools, outages, strict=True):
            try:
                pool.queue.sweep()
                outage.recovered()
            except Exception as error:  # a defect must not end the router
                outage.failed(error, traceback=error)
        await asyncio.sleep(SWEEP_EVERY_S)
