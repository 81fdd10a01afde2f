"""Poller of a pool: finds its replicas, and scrapes those that are assigned to this poller."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random

import aiohttp
import zmq.asyncio

from extproc.config import Config
from extproc.ground.clock import monotonic, wall
from extproc.poll.destination import Destination
from extproc.poll.discovery import RESOLVE_S, Discovery, Target
from extproc.poll.kv_blocks import KvBlocks
from extproc.poll.kv_stream import KvStream
from extproc.poll.replica import PolledReplica
from extproc.poll.scrape import PollMetrics, open_session
from extproc.predict.estimator import FleetPrior
from extproc.replica_state import ReplicaState
from extproc.share.assignment import BEAT_S

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Polled:
    target: Target
    replica: PolledReplica
    task: asyncio.Task[None]


class Poller:
    """Scrapes the discovered replicas that ``into.claim`` assigns to this poller."""

    def __init__(
        self, config: Config, into: Destination, metrics: PollMetrics, random: Random
    ) -> None:
        self._settings = config.poll
        self._into = into
        self._random = random
        self._discovery = Discovery(
            config.replicas,
            config.replicas_file,
            RESOLVE_S,
            drains=into.drains,
            random=random,
            answers=lambda id_: id_ in self._polled and self._polled[id_].replica.healthy,
        )
        self.unlisted = self._discovery.unlisted
        self._new_replica = partial(
            PolledReplica,
            publish=self._publish,
            metrics=metrics,
            settings=config.poll,
            prior=FleetPrior(),
            monotonic=monotonic,
            wall=wall,
            random=random,
            by_priority=config.priority_scheduling,
        )
        self._targets: dict[str, Target] = {}
        self._polled: dict[str, _Polled] = {}
        self._leaving: set[str] = set()  # no longer discovered; their states are to be deleted
        metrics.lookups_failing.labels(config.pool).set_function(
            lambda: len(self._discovery.problems())
        )
        metrics.replicas.labels(config.pool).set_function(lambda: len(self._polled))
        metrics.healthy.labels(config.pool).set_function(
            lambda: sum(polled.replica.healthy for polled in self._polled.values())
        )

    async def run(self) -> None:
        """Polls until cancelled; states then stay in Redis for their TTL."""
        try:
            async with open_session(self._settings.give_up_s) as session:
                with zmq.asyncio.Context() as context:
                    async with asyncio.TaskGroup() as tasks:
                        start = partial(self._start, tasks, session, context)
                        await self._discover()
                        tasks.create_task(self._rediscover())
                        while True:
                            await self._update_assignment(start)
                            await asyncio.sleep(BEAT_S)
        finally:
            self._discovery.stop()
            await self._into.release()

    def _start(
        self,
        tasks: asyncio.TaskGroup,
        session: aiohttp.ClientSession,
        context: zmq.asyncio.Context,
        target: Target,
        known: ReplicaState | None,
    ) -> _Polled:
        kv_stream = None
        if (ports := target.kv_events_ports) is not None:
            blocks = KvBlocks(self._random, monotonic)
            kv_stream = KvStream(context, target, ports, blocks, self._into, monotonic)
        replica = self._new_replica(target, session, known=known, kv_stream=kv_stream)
        return _Polled(target, replica, tasks.create_task(replica.run()))

    async def _rediscover(self) -> None:
        while True:
            changed = self._into.drains.changed
            with suppress(TimeoutError):
                async with asyncio.timeout(RESOLVE_S):
                    await changed.wait()
            changed.clear()
            await self._discover()

    async def _discover(self) -> None:
        targets = {target.id: target for target in await self._discovery.targets()}
        for replica in targets.keys() - self._targets.keys():
            self._leaving.discard(replica)
            self._into.forget(replica)  # cancels a removal that is not written yet
        before, self._targets = self._targets, targets
        for replica in before.keys() & targets.keys() & self._polled.keys():
            was, now, polled = before[replica], targets[replica], self._polled[replica].replica
            polled.target = now
            if polled.state and (was.draining, was.ready) != (now.draining, now.ready):
                self._publish(polled.state)  # routers must not wait for the next scrape

    async def _update_assignment(
        self, start: Callable[[Target, ReplicaState | None], _Polled]
    ) -> None:
        targets = self._targets
        problems = [f"{name}: {why}" for name, why in self._discovery.problems().items()]
        assigned = await self._into.claim(targets, problems)
        # After a lapse another poller may have scraped the replicas: start all of them again.
        lost = {*self._polled} if assigned.lapsed else self._polled.keys() - assigned.replicas
        for replica in lost:
            self._stop(replica)
            self._into.forget(replica)
        self._leaving |= lost - targets.keys()
        for replica in self._leaving - assigned.listed_by_others:
            self._leaving.remove(replica)
            self._into.remove(replica)
            log.info("replica left the pool", extra={"replica": replica})
        if assigned.redis_was_emptied:
            for polled in self._polled.values():
                polled.replica.resend_all()
        new = assigned.replicas - self._polled.keys()
        known = await self._into.last_states(new) if new else {}
        for replica in new:
            self._polled[replica] = start(targets[replica], known.get(replica))
        if new or lost:
            extra = {"added": len(new), "removed": len(lost), "scraped": len(self._polled)}
            log.info("replicas scraped by this poller changed", extra=extra)
        for replica, polled in list(self._polled.items()):
            if polled.target != targets[replica]:  # its name or profile changed
                self._stop(replica)
                self._polled[replica] = start(targets[replica], polled.replica.state)

    def _publish(self, state: ReplicaState) -> None:
        if target := self._targets.get(state.id):  # None: the replica left
            self._into.put(target.marked(state))

    def _stop(self, replica: str) -> None:
        self._polled.pop(replica).task.cancel()
