"""Routers of the simulation, each with its own ledger, that share digests as in production."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from math import inf
from random import Random

from extproc.config import HoldSettings
from extproc.fleet.digest import EVERY_S, Digest, decode
from extproc.fleet.fleet import Ended, Fleet
from extproc.fleet.ledger import Ticket
from extproc.ground.clock import Clock
from extproc.lab.replay.served import Arrival, Served, VirtualClock
from extproc.proxy.services import Reader
from extproc.replica_state import ReplicaState
from extproc.route.queue import Queue
from extproc.route.router import Decision, Router


class Node:
    """One router: its decisions, and what it hears of requests."""

    def __init__(
        self,
        fleet: Fleet,
        policy: str,
        random: Random,
        clock: Clock,
        hold: HoldSettings,
        chunks_per_s: float,
        session_cost_s: float = 0.0,
    ) -> None:
        self.fleet = fleet
        self.router = Router(fleet, policy, random, session_cost_s)
        self._reader = Reader(chunks_per_s)
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}
        self.queue = Queue(fleet, hold, clock)

    def sent(self, served: Served) -> None:
        """A request was sent; whether a streamed answer is read is decided now."""
        decision, profile = served.decision, served.profile
        ticket = self.fleet.dispatch(decision.replica, profile, decision.cached)
        self._tickets[served.number] = ticket
        self.fleet.sessions.saw(profile.session, decision.replica)
        chunks, teaches = decision.prediction.output_tokens, self.fleet.teaches(ticket)
        if profile.stream:
            served.watched = self._reader.reads(self._clock(), chunks, teaches)

    def retried(self, served: Served) -> None:
        """It is served by another replica than it was sent to, which failed."""
        self.fleet.eligibility.failed(served.decision.replica)
        self.fleet.move(self._tickets[served.number], served.replica, served.profile.prefix)

    def answered(self, served: Served) -> None:
        self.fleet.eligibility.answered(served.replica)

    def failed(self, served: Served) -> None:
        self.fleet.eligibility.failed(served.replica)

    def first_token(self, served: Served) -> None:
        if served.watched:
            self.fleet.first_token(self._tickets[served.number])

    def ended(self, served: Served) -> None:
        if served.watched and served.profile.stream:
            expected = served.decision.prediction.output_tokens
            self._reader.came(served.sequence.output_tokens, expected)
        ended = self.fleet.release(self._tickets.pop(served.number), served.prefill_seen)
        if served.finished is not None:
            self._learn(served, ended)

    def let_go(self, served: Served) -> None:
        self.queue.let_go(served.replica)

    def _learn(self, served: Served, ended: Ended) -> None:
        forecast, replica = served.decision.forecast(), served.replica
        if served.watched:
            tokens, waited = served.sequence.output_tokens, served.sent - served.traced.at
            seen = served.ttft - waited if served.profile.stream else None
            took = served.completion - waited
            if replica == forecast.replica:
                self.router.margins.completion.observe(forecast.predicted_completion, took)
            self.router.learn(forecast, replica, tokens, took, seen, ended.alone)
        else:
            self.router.learn_counted(forecast, replica, ended, None)


News = Callable[[Node, Served], None]


class Routers:
    """Routers that share polls, and digests with a lag; requests are dealt at random."""

    def __init__(
        self, nodes: Sequence[Node], share_lag: float | None, clock: VirtualClock, random: Random
    ) -> None:
        """``share_lag``: seconds that a digest takes to the others; None: it never arrives."""
        self.nodes = nodes
        self._share_lag = None if len(nodes) == 1 else share_lag
        self._next = cycle(nodes)
        self._due_at = 0.0
        self._clock = clock
        self._random = random
        self._owner: dict[int, Node] = {}
        self._under_way: deque[tuple[float, Digest | None, str, bytes]] = deque()

    def decide(self, arrival: Arrival) -> Decision | None:
        """The decision of a router drawn at random; None where no replica can be used."""
        owner = self._owner[arrival.number] = self._random.choice(self.nodes)
        return owner.router.decide(arrival.profile, among=arrival.among)

    def owner(self, arrival: Arrival) -> Node:
        return self._owner[arrival.number]

    def tell(self, served: Served, news: News) -> None:
        news(self._owner[served.number], served)

    def ended(self, served: Served) -> None:
        self.tell(served, Node.ended)

    def publish(self, state: ReplicaState) -> None:
        """Reaches every router at once."""
        for node in self.nodes:
            node.fleet.put(state)

    def deliver(self, until: float) -> None:
        """Each router's turn comes as often as in production; all digests take equally long."""
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
                        node.fleet.hear(digest)
                    node.fleet.hear_prompts(router, prompts)
            else:
                self._due_at += EVERY_S / len(self.nodes)
                fleet = next(self._next).fleet
                due, prompts = fleet.digests.due(at), fleet.sent.take()
                digest = None if due is None else decode(due.encode())
                if digest or prompts:
                    told = at + self._share_lag, digest, fleet.router, prompts
                    self._under_way.append(told)
