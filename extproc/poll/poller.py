"""Scrapes the replicas of one pool that are this poller's, as replicas and pollers come and go."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

import zmq.asyncio

from extproc.clock import monotonic, wall
from extproc.config import Config
from extproc.poll.discovery import Discovery, Target
from extproc.poll.kv_blocks import KvBlocks
from extproc.poll.kv_stream import KvSink, KvStream
from extproc.poll.membership import Membership
from extproc.poll.replica import PolledReplica
from extproc.poll.scrape import open_session
from extproc.poll.scrape_metrics import PollMetrics
from extproc.predict.typical import Typical
from extproc.replica_state import ReplicaState
from extproc.store.leases import TEND_S, Held

log = logging.getLogger(__name__)

Known = Callable[[Collection[str]], Awaitable[Mapping[str, ReplicaState]]]
"""What the pollers before saw of these replicas, by id, as far as anybody knows."""


class Sink(Protocol):
    """Where states go: :class:`~extproc.poll.publisher.Publisher`, or the fleet of one router."""

    def put(self, state: ReplicaState) -> None:
        """A replica's newest state."""

    def forget(self, replica: str) -> None:
        """Another poller has the replica now."""

    def remove(self, replica: str) -> None:
        """The replica left the pool."""


class Shares(Protocol):
    """Says which of a pool's replicas are this poller's: :class:`~extproc.store.leases.Leases`."""

    async def tend(self, replicas: Collection[str]) -> Held:
        """The part of these replicas that is this poller's until the next call."""

    async def release(self) -> None:
        """Give up everything."""


@dataclass(frozen=True, slots=True)
class _Polled:
    target: Target
    replica: PolledReplica
    task: asyncio.Task[None]


_Start = Callable[[Target, ReplicaState | None], _Polled]


class Poller:
    """Scrapes its share of the replicas that discovery names.

    Args:
        config: which replicas, and how they are scraped.
        metrics: where it counts.
        sink: where states go.
        shares: which of the replicas are this poller's.
        known: what the pollers before saw of them.
        random: spreads the scrapes.
        kv_sink: where what is known of their KV blocks goes.
        membership: what commands asked for; None: there are none.
    """

    def __init__(
        self,
        config: Config,
        metrics: PollMetrics,
        sink: Sink,
        shares: Shares,
        known: Known,
        random: Random,
        kv_sink: KvSink,
        membership: Membership | None = None,
    ) -> None:
        self._settings = config.poll
        self._metrics = metrics
        self._sink = sink
        self._shares = shares
        self._known = known
        self._random = random
        self._kv_sink = kv_sink
        self._membership = membership or Membership()
        self._discovery = Discovery(
            config.replicas,
            config.replicas_file,
            config.poll.resolve_s,
            membership=self._membership,
        )
        self._typical = Typical()
        self._targets: dict[str, Target] = {}
        self._polled: dict[str, _Polled] = {}
        metrics.replicas.labels(config.pool).set_function(lambda: len(self._polled))
        metrics.healthy.labels(config.pool).set_function(
            lambda: sum(polled.replica.healthy for polled in self._polled.values())
        )

    async def run(self) -> None:
        """Poll until cancelled; states in Redis then live on for their TTL."""
        try:
            async with open_session(self._settings.give_up_s) as session:
                with zmq.asyncio.Context() as context:
                    async with asyncio.TaskGroup() as tasks:

                        def start(target: Target, known: ReplicaState | None) -> _Polled:
                            replica = PolledReplica(
                                target,
                                session,
                                lambda state: self._sink.put(self._membership.marked(state)),
                                self._metrics,
                                self._settings,
                                self._typical,
                                known,
                                self._kv_stream(target, context),
                                monotonic=monotonic,
                                wall=wall,
                                random=self._random,
                            )
                            return _Polled(target, replica, tasks.create_task(replica.run()))

                        await self._discover()
                        tasks.create_task(self._rediscover())
                        while True:
                            await self._follow(start)
                            await asyncio.sleep(TEND_S)
        finally:
            await self._shares.release()

    def _kv_stream(self, target: Target, context: zmq.asyncio.Context) -> KvStream | None:
        if (ports := target.kv_events_ports) is None:
            return None
        blocks = KvBlocks(self._random, monotonic)
        return KvStream(context, target, ports, blocks, self._kv_sink, monotonic)

    async def _rediscover(self) -> None:
        while True:
            await self._discovery.wait(self._settings.resolve_s)
            await self._discover()

    async def _discover(self) -> None:
        targets = {target.id: target for target in await self._discovery.targets()}
        for replica in targets.keys() - self._targets.keys():
            self._sink.forget(replica)  # it may have left while Redis was away: that is over
        self._targets = targets

    async def _follow(self, start: _Start) -> None:
        targets = self._targets
        for replica in self._polled.keys() - targets.keys():
            self._stop(replica)
            self._sink.remove(replica)
            log.info("replica left", extra={"replica": replica})
        held = await self._shares.tend(targets)
        lost = self._polled.keys() - (held.replicas - held.taken)
        for replica in lost:
            self._stop(replica)
            self._sink.forget(replica)
        for replica in held.reclaimed:
            self._polled[replica].replica.tell_again()
        new = held.replicas - self._polled.keys()
        known = await self._known(new) if new else {}
        for replica in new:
            self._polled[replica] = start(targets[replica], known.get(replica))
        if new or lost:
            extra = {"taken": len(new), "lost": len(lost), "scraped": len(self._polled)}
            log.info("replicas to scrape changed", extra=extra)
        for replica, polled in list(self._polled.items()):
            if polled.target != targets[replica]:  # it got another name or profile
                self._stop(replica)
                self._polled[replica] = start(targets[replica], polled.replica.state)

    def _stop(self, replica: str) -> None:
        self._polled.pop(replica).task.cancel()
