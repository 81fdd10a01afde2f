"""``extproc poll``: writes states and KV blocks of replicas into Redis, for every router."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from random import Random

from prometheus_client import CollectorRegistry, ProcessCollector
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from extproc.config import Config
from extproc.ground.address import split_address
from extproc.ground.clock import Clock, monotonic
from extproc.ground.runtime import together, until_signalled
from extproc.observe.admin import serve_admin
from extproc.observe.metrics import build_info
from extproc.poll.destination import Destination
from extproc.poll.discovery import names_replicas
from extproc.poll.kv_blocks import KvBlocks
from extproc.poll.poller import Poller
from extproc.poll.scrape import PollMetrics
from extproc.replica_state import TTL_S, ReplicaState
from extproc.share.assignment import Assigner, Assignment
from extproc.share.blocks import BlockWriter
from extproc.share.connection import connect, reconnecting
from extproc.share.drains import DrainStore
from extproc.share.envelope import Skips
from extproc.share.replicas import StateReader, StateWriter

log = logging.getLogger(__name__)

_GATHER_S = 0.02
"""Seconds to collect changes before a write: a round trip to Redis takes as long as writing ten
states, or thousands of KV blocks."""
_POSITIONS_AT_ONCE = 8  # loaded or saved: redis-py opens at most 100 connections
_STUCK_S = 10.0
"""Seconds without a heartbeat after which the poller is not live: five times the duration of the
slowest heartbeat, whose Redis commands almost time out."""


async def run_poller(config: Config) -> None:
    """Polls this poller's share of the configured replicas until cancelled, SIGTERM or SIGINT.

    Raises:
        OSError: the admin address cannot be served.
        ValueError: the configuration keeps state in memory.
    """
    if config.state == "memory":
        raise ValueError(
            "state is 'memory': the router polls its replicas itself; "
            "to run pollers, or several routers, set state to 'redis'"
        )
    if not names_replicas(config):
        log.warning(
            "no replicas are configured: set replicas or replicas_file, else nothing is polled"
        )
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build_info(registry)
    metrics = PollMetrics(registry)
    health = Health(monotonic)
    async with serve_admin(
        config.poll.admin,
        registry,
        access=config.admin,
        live=health.live,
        ready=health.ready,
        setting="poll.admin",
    ) as address:
        log.info(
            "poller started",
            extra={"pool": ", ".join(pool.pool for pool in config.each_pool), "admin": address},
        )
        await until_signalled(*(_poll(pool, metrics, health) for pool in config.each_pool))


class Health:
    """Reasons for which a poller fails ``/livez`` or ``/readyz``; without a reason, the check
    passes. Each pool is added when its task starts, before the first check is answered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pools: dict[str, tuple[Assigner, Callable[[], Iterable[str]]]] = {}

    def add(self, pool: str, assigner: Assigner, unread: Callable[[], Iterable[str]]) -> None:
        self._pools[pool] = assigner, unread

    def live(self) -> str:
        """Returns why the process has to be restarted: heartbeats of pools have stopped."""
        now = self._clock()
        return "; ".join(
            f"pool {pool}: no heartbeat for {now - assigner.beat_at:.0f} s"
            for pool, (assigner, _) in self._pools.items()
            if assigner.beat_at is not None and now - assigner.beat_at > _STUCK_S
        )

    def ready(self) -> str:
        """Returns the reasons why the poller's states do not reach the routers."""
        reasons = []
        for pool, (assigner, unread) in self._pools.items():
            reasons += [f"pool {pool}: no heartbeat yet"] if assigner.beat_at is None else []
            reasons += [f"pool {pool}: redis is lost"] if assigner.outage.problem else []
            reasons += [f"pool {pool}: {source} was never read: see the log" for source in unread()]
        return "; ".join(reasons) or self.live()


async def _poll(config: Config, metrics: PollMetrics, health: Health) -> None:
    random = Random()
    _, port = split_address(config.poll.admin)
    name = f"{socket.gethostname()}:{port}:{random.getrandbits(32):08x}"
    async with connect(config.redis, config.pool) as redis:
        into = IntoRedis(redis, config, name, Skips(metrics.skipped))
        poller = Poller(config, into, metrics, random)
        metrics.redis_lost.labels(config.pool).set_function(
            lambda: bool(into.assigner.outage.problem)
        )
        health.add(config.pool, into.assigner, poller.unread)
        await into.drains.look(into.drain_store, monotonic())
        await together(poller.run(), into.run())


class IntoRedis(Destination):
    """Writes states and changes of KV blocks into Redis; callers do not wait for the writes.

    Scrapes soon replace states that Redis lost. While the poller's heartbeat has lapsed, nothing is
    written, because another poller may have newer states.
    """

    def __init__(self, redis: Redis, config: Config, name: str, skips: Skips | None = None) -> None:
        super().__init__()
        pool = config.pool
        self.assigner = Assigner(redis, pool, name, monotonic, skips)
        self._reader = StateReader(redis, pool, skips)
        self._writer = StateWriter(redis, pool, TTL_S)
        self._block_writer = BlockWriter(redis, pool)
        self.drain_store = DrainStore(redis, pool, skips)
        self._changed: dict[str, ReplicaState] = {}  # states to be written
        self._leaving: set[str] = set()  # replicas whose state has to be deleted
        self._states_due = asyncio.Event()
        self._changed_blocks: dict[str, KvBlocks] = {}
        self._blocks_due = asyncio.Event()
        self._position_turns = asyncio.Semaphore(_POSITIONS_AT_ONCE)

    async def run(self) -> None:
        """Writes until cancelled, and then gives up all replicas: other pollers take them over."""
        try:
            await together(
                self._keep_writing(self._states_due, self._write_states),
                self._keep_writing(self._blocks_due, self._write_blocks),
                self.drains.follow(self.drain_store, monotonic),
            )
        finally:
            await self.assigner.release()

    async def _keep_writing(self, due: asyncio.Event, write: Callable[[], Awaitable[bool]]) -> None:
        backoff = reconnecting()
        while True:
            await due.wait()
            await asyncio.sleep(_GATHER_S)
            due.clear()
            if self.assigner.lapsed or await write():
                backoff.reset()
            else:
                await asyncio.sleep(backoff.next())

    def put(self, state: ReplicaState) -> None:
        self._changed[state.id] = state
        self._leaving.discard(state.id)
        self._states_due.set()

    def remove(self, replica: str) -> None:
        self.forget(replica)
        self._leaving.add(replica)
        self._states_due.set()

    def forget(self, replica: str) -> None:
        self._changed.pop(replica, None)
        self._leaving.discard(replica)
        self._changed_blocks.pop(replica, None)

    async def _write_states(self) -> bool:
        leaving, refusal = frozenset(self._leaving), None
        try:
            try:
                await self._writer.remove([*leaving])  # first, because a full Redis refuses ``put``
                self._leaving -= leaving
            except ResponseError as error:  # Redis may still publish states
                refusal = error
            changed = dict(self._changed)
            await self._writer.put([*changed.values()])
            if refusal is not None:
                raise refusal
        except (RedisError, OSError) as error:
            self._states_due.set()
            self.assigner.outage.failed(error)
            return False
        self._changed = {
            replica: state
            for replica, state in self._changed.items()
            if state is not changed.get(replica)
        }
        self.assigner.outage.recovered()
        return True

    async def claim(self, replicas: Collection[str], problems: Collection[str] = ()) -> Assignment:
        assigned = await self.assigner.beat(replicas, problems)
        if assigned.redis_was_emptied:
            log.warning("redis was emptied: writing everything again")
        return assigned

    async def last_states(self, replicas: Collection[str]) -> Mapping[str, ReplicaState]:
        try:
            return {state.id: state for state in (await self._reader.read(replicas)).states}
        except (RedisError, OSError):  # _write_states logs the outage
            return {}

    async def blocks_changed(self, replica: str, blocks: KvBlocks) -> None:
        self._changed_blocks[replica] = blocks
        self._blocks_due.set()

    async def _write_blocks(self) -> bool:
        changed, self._changed_blocks = self._changed_blocks, {}
        updates = {
            replica: update
            for replica, blocks in changed.items()
            if (update := blocks.next_update())
        }
        try:
            for replica in await self._block_writer.write(updates):
                changed[replica].resend_all(backs_off=True)
        except (RedisError, OSError):
            for replica in updates:
                changed[replica].resend_all()
            return False
        return True

    async def save_blocks(self, replica: str, dump: Callable[[], bytes]) -> bool:
        if self._position_turns.locked():
            return False
        with suppress(RedisError, OSError):
            async with self._position_turns:
                await self._block_writer.save(replica, dump())
        return True

    async def load_blocks(self, replica: str) -> bytes:
        with suppress(RedisError, OSError):
            async with self._position_turns:
                return await self._block_writer.load(replica)
        return b""
