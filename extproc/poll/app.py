"""The poller as a program: ``extproc poll``."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from random import Random
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from redis.exceptions import RedisError

from extproc.backoff import Backoff
from extproc.clock import monotonic, wall
from extproc.config import Config
from extproc.observe.admin import serve_admin
from extproc.poll.discovery import Discovery, Target
from extproc.poll.members import Membership
from extproc.poll.metrics import PollMetrics
from extproc.poll.poller import Poller, Sink
from extproc.poll.publisher import Publisher
from extproc.poll.scrape import open_session
from extproc.poll.watch import Watch
from extproc.predict.step import StepModel
from extproc.predict.typical import Typical
from extproc.state.connection import Outage, connect
from extproc.state.members import MemberStore
from extproc.state.store import RECONNECT_FIRST_S, RECONNECT_MOST_S, StateReader, StateWriter

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def run_poller(config: Config) -> None:
    """Scrape the configured replicas into Redis until cancelled, SIGTERM or SIGINT.

    Raises:
        OSError: the admin address cannot be served.
        ValueError: the configuration keeps state in memory.
    """
    if config.state == "memory":
        raise ValueError(
            "state is 'memory': the router polls its replicas itself; "
            "for pollers of their own, or several routers, set it to 'redis'"
        )
    if not _names_some(config):
        log.warning("no replicas are configured: only those of 'extproc replicas add' are polled")
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = PollMetrics(registry)
    async with serve_admin(config.poll.admin, registry) as admin:
        names = ", ".join(pool.pool for pool in config.each_pool)
        log.info("poller ready", extra={"pool": names, "admin": admin})
        await _until_signalled(*(_share(pool, metrics) for pool in config.each_pool))


async def _share(config: Config, metrics: PollMetrics) -> None:
    """Brings what is seen of one pool's replicas into Redis."""
    random = Random()
    async with connect(config.redis.url, config.pool) as redis:
        writer = StateWriter(redis, config.pool, config.poll.ttl_s)
        backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MOST_S, random)
        publisher = Publisher(writer, Outage(redis), backoff)
        members, membership = MemberStore(redis, config.pool), Membership()
        await membership.look(members, monotonic())
        known = await _learned_before(StateReader(redis, config.pool, random))
        async with (
            polling(config, metrics, publisher, random, known, membership) as poller,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(poller.run())
            tasks.create_task(membership.follow(members, monotonic))


def check_some(config: Config) -> None:
    """Look whether there is anything to poll.

    Raises:
        ValueError: the configuration names no replicas.
    """
    if not _names_some(config):
        raise ValueError("no replicas to poll: configure 'replicas' or 'replicas_file'")


def _names_some(config: Config) -> bool:
    return any(pool.replicas or pool.replicas_file for pool in config.each_pool)


@asynccontextmanager
async def polling(
    config: Config,
    metrics: PollMetrics,
    sink: Sink,
    random: Random,
    known: Mapping[tuple[str, str], StepModel] = MappingProxyType({}),
    membership: Membership | None = None,
) -> AsyncIterator[Poller]:
    """A poller of one pool that brings what it sees into ``sink``.

    Args:
        config: which replicas, and how they are scraped.
        metrics: where it counts.
        sink: where states go.
        random: spreads the scrapes.
        known: step models to start from, by replica and profile.
        membership: what commands asked for; None: there are none.
    """
    settings = config.poll
    metrics = metrics.of(config.pool)
    membership = membership or Membership()
    discovery = Discovery(
        config.replicas, config.replicas_file, settings.resolve_s, membership=membership
    )
    typical = Typical()
    learned = dict(known)
    async with open_session(settings.timeout_s) as session:

        def watch(target: Target) -> Watch:
            return Watch(
                target,
                session,
                lambda state: sink.put(membership.marked(state)),
                metrics,
                settings,
                typical,
                learned.pop((target.id, target.profile), None),
                monotonic=monotonic,
                wall=wall,
                random=random,
            )

        yield Poller(discovery, sink, watch, metrics, settings.resolve_s)


async def _learned_before(reader: StateReader) -> dict[tuple[str, str], StepModel]:
    """Step models in Redis, from the poller before, by replica and profile; none where Redis is not
    there yet."""
    try:
        states = await reader.states()
    except (RedisError, OSError):  # the publisher will say so
        return {}
    learned = ((state.id, state.profile, state.learned) for state in states if state.measured)
    return {(id_, profile): model for id_, profile, model in learned if model is not None}


async def _until_signalled(*parts: Coroutine[Any, Any, None]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(part) for part in parts]
            await stop.wait()
            for part in running:
                part.cancel()
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
