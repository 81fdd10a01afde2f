"""Poller of a pool: finds the pool's replicas, and scrapes the replicas assigned to this poller."""

import asyncio
import logging
from contextlib import suppress
from functools import partial
from random import Random

import zmq
import zmq.asyncio

from extproc.config import Config
from extproc.poll.destination import Destination
from extproc.poll.discovery import RESOLVE_S, Discovery, Target
from extproc.poll.replica import PollContext, PolledReplica
from extproc.poll.scrape import PollMetrics, open_session
from extproc.replica_state import STALE_AFTER_S
from extproc.share.assignment import BEAT_S

log = logging.getLogger(__name__)


class Poller:
    """Scrapes the discovered replicas that ``into.claim`` assigns to this poller."""

    def __init__(
        self, config: Config, into: Destination, metrics: PollMetrics, random: Random
    ) -> None:
        self._into = into
        self._context = partial(PollContext, config, into, metrics, random)
        self._config = config
        self._discovery = Discovery(
            config.replicas,
            config.replicas_file,
            RESOLVE_S,
            drains=into.drains,
            random=random,
            stays=self._stays,
        )
        self.unread = self._discovery.unread
        self._targets: dict[str, Target] = {}
        self._polled: dict[str, PolledReplica] = {}
        self._leaving: set[str] = set()  # no longer discovered; their states are to be deleted
        metrics.lookups_failing.labels(config.pool).set_function(
            lambda: len(self._discovery.problems())
        )
        metrics.replicas.labels(config.pool).set_function(lambda: len(self._polled))
        metrics.healthy.labels(config.pool).set_function(
            lambda: sum(polled.usable for polled in self._polled.values())
        )

    async def run(self) -> None:
        """Polls until cancelled; states then stay in Redis for their TTL."""
        try:
            with zmq.asyncio.Context() as sockets:
                # By default 1,023 sockets: a replica with KV events takes two.
                sockets.set(zmq.MAX_SOCKETS, sockets.get(zmq.SOCKET_LIMIT))
                session = open_session(self._config.poll.give_up_s)
                async with session, asyncio.TaskGroup() as tasks:
                    context = self._context(tasks, session, sockets)
                    await self._discover()
                    tasks.create_task(self._rediscover())
                    while True:
                        await self._update_assignment(context)
                        await asyncio.sleep(BEAT_S)
        finally:
            self._discovery.stop()

    def _stays(self, replica: str) -> bool:
        """Returns True if a replica stays although DNS no longer names its address: the replica
        answers scrapes, or it hangs and routers will end its requests soon."""
        if (polled := self._polled.get(replica)) is None:
            return False
        hangs = 0.0 < polled.state.unanswered_s < self._config.serve.hung_s + STALE_AFTER_S
        return polled.state.healthy or hangs

    async def _rediscover(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RESOLVE_S):
                    await self._into.drains.changed.wait()
            self._into.drains.changed.clear()
            await self._discover()

    async def _discover(self) -> None:
        targets = {target.id: target for target in await self._discovery.targets()}
        for replica in targets.keys() - self._targets.keys():
            self._leaving.discard(replica)
            self._into.forget(replica)  # cancels a removal that is not written yet
        self._targets = targets
        for replica, polled in self._polled.items():
            if (target := targets.get(replica)) == polled.target:  # else its scraper is replaced
                polled.mark(target)

    async def _update_assignment(self, context: PollContext) -> None:
        targets = self._targets
        problems = [f"{name}: {why}" for name, why in self._discovery.problems().items()]
        assigned = await self._into.claim(targets, problems)
        # After a lapse, another poller may have scraped the replicas: start all scrapes anew.
        lost = {*self._polled} if assigned.lapsed else self._polled.keys() - assigned.replicas
        for replica in lost:
            self._polled.pop(replica).stop()
            self._into.forget(replica)
        self._leaving |= lost - targets.keys()
        for replica in self._leaving - assigned.listed_by_others:
            self._leaving.remove(replica)
            self._into.remove(replica)
            log.info("replica left the pool", extra={"replica": replica})
        if assigned.redis_was_emptied:
            for polled in self._polled.values():
                polled.resend_all()
        new = assigned.replicas - self._polled.keys()
        known = await self._into.last_states(new) if new else {}
        targets = targets | self._targets  # meanwhile, draining or ready may have changed
        for replica in new:
            self._polled[replica] = PolledReplica(targets[replica], known.get(replica), context)
        if new or lost:
            log.info(
                "this poller started or stopped scraping replicas",
                extra={"added": len(new), "removed": len(lost), "scraped": len(self._polled)},
            )
        for replica, polled in self._polled.items():
            if polled.target != targets[replica]:  # its name or profile changed
                polled.stop()
                self._polled[replica] = PolledReplica(targets[replica], polled.state, context)
