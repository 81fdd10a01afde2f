"""Keeps one watch per replica of this poller's share, as replicas and pollers come and go."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from extproc.poll.discovery import Discovery, Target
from extproc.poll.metrics import PollMetrics
from extproc.poll.watch import Watch
from extproc.replica_state import ReplicaState
from extproc.store.leases import TEND_S, Held

log = logging.getLogger(__name__)

Known = Callable[[Collection[str]], Awaitable[Mapping[str, ReplicaState]]]
"""What the pollers before saw of these replicas, by id, as far as anybody knows."""


class Sink(Protocol):
    """Where states go: :class:`~extproc.poll.publisher.Publisher`, or the fleet of one router."""

    def put(self, state: ReplicaState) -> None:
        """A replica's newest state."""

    def republish(self, replica_id: str) -> None:
        """Nobody may know the newest state any more."""

    def forget(self, replica_id: str) -> None:
        """Another poller has the replica now."""

    def remove(self, replica_id: str) -> None:
        """The replica left the pool."""

    async def run(self) -> None:
        """What has to go on beside that, until cancelled."""


class Shares(Protocol):
    """Says which of a pool's replicas are this poller's: :class:`~extproc.store.leases.Leases`."""

    async def tend(self, replicas: Collection[str]) -> Held:
        """The part of these replicas that is this poller's until the next call."""

    async def release(self) -> None:
        """Give up everything."""


@dataclass(frozen=True, slots=True)
class _Watched:
    target: Target
    watch: Watch
    task: asyncio.Task[None]


class Poller:
    """Scrapes its share of the replicas that discovery names."""

    def __init__(
        self,
        discovery: Discovery,
        shares: Shares,
        known: Known,
        sink: Sink,
        watch: Callable[[Target, ReplicaState | None], Watch],
        metrics: PollMetrics,
        resolve_s: float,
    ) -> None:
        self._discovery = discovery
        self._shares = shares
        self._known = known
        self._sink = sink
        self._new_watch = watch
        self._resolve_s = resolve_s
        self._targets: dict[str, Target] = {}
        self._watched: dict[str, _Watched] = {}
        metrics.replicas.set_function(lambda: len(self._watched))
        metrics.healthy.set_function(
            lambda: sum(watched.watch.healthy for watched in self._watched.values())
        )

    async def run(self) -> None:
        """Poll until cancelled; states in Redis then live on for their TTL."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sink.run())
                await self._discover()
                tasks.create_task(self._rediscover())
                while True:
                    await self._follow(tasks)
                    await asyncio.sleep(TEND_S)
        finally:
            await self._shares.release()

    async def _rediscover(self) -> None:
        while True:
            await self._discovery.wait(self._resolve_s)
            await self._discover()

    async def _discover(self) -> None:
        targets = {target.id: target for target in await self._discovery.targets()}
        for replica in targets.keys() - self._targets.keys():
            self._sink.forget(replica)  # it may have left while Redis was away: that is over
        self._targets = targets

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        targets = self._targets
        self._drop_departed(targets)
        held = await self._shares.tend(targets)
        lost = self._watched.keys() - (held.replicas - held.taken)
        for replica in lost:
            self._stop(replica)
            self._sink.forget(replica)
        for replica in held.reclaimed:
            self._sink.republish(replica)
            self._watched[replica].watch.tell_again()
        new = held.replicas - self._watched.keys()
        known = await self._known(new) if new else {}
        for replica in new:
            self._start(targets[replica], known.get(replica), tasks)
        if new or lost:
            extra = {"taken": len(new), "lost": len(lost), "scraped": len(self._watched)}
            log.info("replicas to scrape changed", extra=extra)
        self._rewatch_changed(targets, tasks)

    def _drop_departed(self, targets: Mapping[str, Target]) -> None:
        for replica in self._watched.keys() - targets.keys():
            self._stop(replica)
            self._sink.remove(replica)
            log.info("replica left", extra={"replica": replica})

    def _rewatch_changed(self, targets: Mapping[str, Target], tasks: asyncio.TaskGroup) -> None:
        """A replica may get another name or profile."""
        for replica, watched in list(self._watched.items()):
            if watched.target != targets[replica]:
                self._stop(replica)
                self._start(targets[replica], watched.watch.state, tasks)

    def _start(self, target: Target, known: ReplicaState | None, tasks: asyncio.TaskGroup) -> None:
        watch = self._new_watch(target, known)
        self._watched[target.id] = _Watched(target, watch, tasks.create_task(watch.run()))

    def _stop(self, replica: str) -> None:
        self._watched.pop(replica).task.cancel()
