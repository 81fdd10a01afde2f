"""The poller as a program: ``extproc poll``."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from random import Random

import zmq.asyncio
from prometheus_client import CollectorRegistry, ProcessCollector
from redis.exceptions import RedisError

from extproc.backoff import Backoff
from extproc.clock import monotonic, wall
from extproc.config import Config
from extproc.observe.admin import serve_admin
from extproc.poll.discovery import Discovery, Target
from extproc.poll.health import Health
from extproc.poll.kv_blocks import KvBlocks
from extproc.poll.kv_publisher import KvPublisher
from extproc.poll.kv_stream import KvSink, KvStream
from extproc.poll.members import Membership
from extproc.poll.metrics import PollMetrics
from extproc.poll.poller import Known, Poller, Shares, Sink
from extproc.poll.publisher import Publisher
from extproc.poll.scrape import open_session
from extproc.poll.watch import Watch
from extproc.predict.typical import Typical
from extproc.replica_state import ReplicaState
from extproc.signals import until_signalled
from extproc.store.blocks import BlockWriter
from extproc.store.connection import Outage, connect
from extproc.store.leases import Leases
from extproc.store.members import MemberStore
from extproc.store.replicas import RECONNECT_FIRST_S, RECONNECT_MOST_S, StateReader, StateWriter

log = logging.getLogger(__name__)


async def run_poller(config: Config) -> None:
    """Scrape a share of the configured replicas into Redis until cancelled, SIGTERM or SIGINT.

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
    names = [pool.pool for pool in config.each_pool]
    health = Health(names, monotonic)
    admin = serve_admin(config.poll.admin, registry, live=health.live, ready=health.ready)
    async with admin as address:
        log.info("poller ready", extra={"pool": ", ".join(names), "admin": address})
        await until_signalled(*(_share(pool, metrics, health) for pool in config.each_pool))


async def _share(config: Config, metrics: PollMetrics, health: Health) -> None:
    """Brings what is seen of one pool's replicas into Redis."""
    random = Random()
    pool = config.pool
    name = f"{socket.gethostname()}:{os.getpid()}:{random.getrandbits(32):08x}"
    async with connect(config.redis.url, pool) as redis:
        outage = Outage(redis)
        writer = StateWriter(redis, pool, config.poll.ttl_s, name)
        backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MOST_S, random)
        publisher = Publisher(writer, outage, backoff)
        leases = Leases(redis, pool, name, outage, monotonic)
        health.watch(pool, leases, outage)
        members, membership = MemberStore(redis, pool), Membership()
        await membership.look(members, monotonic())
        known = partial(_known, StateReader(redis, pool, random))
        kv_backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MOST_S, random)
        kv_publisher = KvPublisher(BlockWriter(redis, pool, name), kv_backoff)
        async with (
            polling(
                config, metrics, publisher, leases, known, random, kv_publisher, membership
            ) as poller,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(poller.run())
            tasks.create_task(kv_publisher.run())
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
    shares: Shares,
    known: Known,
    random: Random,
    kv_sink: KvSink,
    membership: Membership | None = None,
) -> AsyncIterator[Poller]:
    """A poller of one pool that brings what it sees into ``sink``.

    Args:
        config: which replicas, and how they are scraped.
        metrics: where it counts.
        sink: where states go.
        shares: which of them are this poller's.
        known: what the pollers before saw of replicas.
        random: spreads the scrapes.
        kv_sink: where what is known of their KV blocks goes.
        membership: what commands asked for; None: there are none.
    """
    settings = config.poll
    metrics = metrics.of(config.pool)
    membership = membership or Membership()
    discovery = Discovery(
        config.replicas, config.replicas_file, settings.resolve_s, membership=membership
    )
    typical = Typical()
    async with open_session(settings.give_up_s) as session:
        with zmq.asyncio.Context() as context:

            def kv_stream(target: Target) -> KvStream | None:
                if target.kv_events_ports is None:
                    return None
                blocks = KvBlocks(random, monotonic)
                ports = target.kv_events_ports
                return KvStream(context, target, ports, blocks, kv_sink, monotonic)

            def watch(target: Target, known: ReplicaState | None) -> Watch:
                return Watch(
                    target,
                    session,
                    lambda state: sink.put(membership.marked(state)),
                    metrics,
                    settings,
                    typical,
                    known,
                    kv_stream(target),
                    monotonic=monotonic,
                    wall=wall,
                    random=random,
                )

            yield Poller(discovery, shares, known, sink, watch, metrics, settings.resolve_s)


async def _known(reader: StateReader, replicas: Collection[str]) -> dict[str, ReplicaState]:
    """What the pollers before wrote of these replicas; nothing where Redis does not tell."""
    try:
        return {state.id: state for state in await reader.states_of(replicas)}
    except (RedisError, OSError):  # the publisher will say so
        return {}
