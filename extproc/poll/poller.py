"""Keeps one watch per replica, as replicas come and go."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from extproc.fleet.state import ReplicaState
from extproc.poll.discovery import Discovery, Target
from extproc.poll.metrics import PollMetrics
from extproc.poll.watch import Watch

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where states go: :class:`~extproc.poll.publisher.Publisher`, or the fleet of one router."""

    def put(self, state: ReplicaState) -> None:
        """A replica's newest state."""

    def remove(self, replica_id: str) -> None:
        """The replica left the pool."""

    async def run(self) -> None:
        """What has to go on beside that, until cancelled."""


class Poller:
    """Scrapes the replicas that discovery names."""

    def __init__(
        self,
        discovery: Discovery,
        sink: Sink,
        watch: Callable[[Target], Watch],
        metrics: PollMetrics,
        resolve_s: float,
    ) -> None:
        self._discovery = discovery
        self._sink = sink
        self._new_watch = watch
        self._resolve_s = resolve_s
        self._watches: dict[Target, tuple[Watch, asyncio.Task[None]]] = {}
        metrics.replicas.set_function(lambda: len(self._watches))
        metrics.healthy.set_function(
            lambda: sum(watch.healthy for watch, _ in self._watches.values())
        )

    async def run(self) -> None:
        """Poll until cancelled; states in Redis then live on for their TTL."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sink.run())
            while True:
                self._follow(await self._discovery.targets(), tasks)
                await self._discovery.wait(self._resolve_s)

    def _follow(self, targets: Iterable[Target], tasks: asyncio.TaskGroup) -> None:
        wanted = set(targets)
        ids = {target.id for target in wanted}
        for target in self._watches.keys() - wanted:
            _, task = self._watches.pop(target)
            task.cancel()
            if target.id not in ids:  # else it only has another name or profile now
                self._sink.remove(target.id)
                log.info("replica left", extra={"replica": target.id})
        for target in wanted - self._watches.keys():
            watch = self._new_watch(target)
            self._watches[target] = watch, tasks.create_task(watch.run())
