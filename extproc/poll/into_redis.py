"""``extproc poll``: what is seen of replicas, brought into Redis, for every router."""

import asyncio
import logging
import os
import socket
from collections.abc import Collection
from random import Random

from prometheus_client import CollectorRegistry, ProcessCollector
from redis.exceptions import RedisError

from extproc.clock import monotonic
from extproc.config import Config
from extproc.observe.admin import serve_admin
from extproc.poll.discovery import names_replicas
from extproc.poll.health import Health
from extproc.poll.membership import Membership
from extproc.poll.poller import Poller
from extproc.poll.publisher import BlockPublisher, Publisher
from extproc.poll.scrape_metrics import PollMetrics
from extproc.replica_state import ReplicaState
from extproc.signals import until_signalled
from extproc.store.blocks import BlockWriter
from extproc.store.connection import Outage, connect, reconnecting
from extproc.store.desired import DesiredStore
from extproc.store.leases import Leases
from extproc.store.replicas import StateReader, StateWriter

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
    if not names_replicas(config):
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
    random, pool = Random(), config.pool
    name = f"{socket.gethostname()}:{os.getpid()}:{random.getrandbits(32):08x}"
    async with connect(config.redis.url, pool) as redis:
        outage = Outage(redis)
        leases = Leases(redis, pool, name, outage, monotonic)
        health.watch(pool, leases, outage)
        reader = StateReader(redis, pool, random)
        writer = StateWriter(redis, pool, config.poll.ttl_s, name)
        states = Publisher(writer, outage, reconnecting(random))
        blocks = BlockPublisher(BlockWriter(redis, pool, name), reconnecting(random))
        desired, membership = DesiredStore(redis, pool), Membership()
        await membership.look(desired, monotonic())

        async def known(replicas: Collection[str]) -> dict[str, ReplicaState]:
            """What the pollers before wrote; nothing where Redis does not tell."""
            try:
                return {state.id: state for state in (await reader.read(replicas)).states}
            except (RedisError, OSError):  # the publisher will say so
                return {}

        poller = Poller(config, metrics, states, leases, known, random, blocks, membership)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(poller.run())
            tasks.create_task(states.run())
            tasks.create_task(blocks.run())
            tasks.create_task(membership.follow(desired, monotonic))
