"""Routers of a simulation that tell each other their requests, with a delay."""

from collections import deque
from collections.abc import Sequence
from itertools import cycle
from math import inf
from random import Random

from extproc.fleet.announcements import SentPrompt
from extproc.fleet.digest import EVERY_S, Digest
from extproc.lab.replay.routers import RouterNode, Routers, VirtualClock
from extproc.share.digests import DIGEST
from extproc.share.envelope import Skips


class SharingRouters(Routers):
    """Routers that receive each other's digests and prompts with a delay."""

    def __init__(
        self,
        nodes: Sequence[RouterNode],
        share_lag: float | None,
        clock: VirtualClock,
        random: Random,
        entries: Sequence[RouterNode],
    ) -> None:
        """
        Args:
            nodes: all routers.
            share_lag: seconds until a digest reaches the other routers; None: routers share
                nothing.
            clock: clock of the simulation.
            random: source of the draws.
            entries: routers from which each request draws one: a router that occurs twice gets
                twice as many requests.
        """
        super().__init__(nodes, random)
        self._entries = entries
        self._share_lag = None if len(nodes) == 1 else share_lag
        self._next = cycle(nodes)
        self._due_at = 0.0
        self._clock = clock
        self._under_way: deque[tuple[float, Digest | None, str, tuple[SentPrompt, ...]]] = deque()

    def deliver(self, until: float) -> None:
        """Send and deliver the digests and prompt logs that are due by ``until``. Routers send as
        often as in production."""
        if self._share_lag is None:
            return
        while True:
            arrives_at = self._under_way[0][0] if self._under_way else inf
            at = min(arrives_at, self._due_at)
            if at > until:
                return
            self._clock.time = at
            if at == arrives_at:
                _, digest, router, prompts = self._under_way.popleft()
                for node in self.nodes:
                    if digest is not None:
                        node.fleet.receive_digest(digest)
                    node.fleet.receive_prompts(router, prompts)
            else:
                self._due_at += EVERY_S / len(self.nodes)
                fleet = next(self._next).fleet
                due, prompts = fleet.digests.due(at), fleet.prompt_log.take()
                digest = due and Skips().open(fleet.router, DIGEST.seal(due), DIGEST)
                if digest or prompts:
                    arrives_at = at + self._share_lag
                    self._under_way.append((arrives_at, digest, fleet.router, prompts))
