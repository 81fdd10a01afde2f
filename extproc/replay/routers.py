"""Routers of the simulation, each with its own ledger, that share digests as in production."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from math import inf
from random import Random

from extproc.clock import Clock
from extproc.config import HoldSettings
from extproc.fleet.digest import EVERY_S, Digest, decode
from extproc.fleet.fleet import Ended, Fleet
from extproc.fleet.ledger import Ticket
from extproc.hold.queue import Queue
from extproc.replay.clock import VirtualClock
from extproc.replay.served import Served
from extproc.replica_state import ReplicaState
from extproc.request.prefix import Prefix
from extproc.request.profile import RequestProfile
from extproc.route.router import Decision, Router
from extproc.server.watch import Reader


class Node:
    """One router: its decisions, and what it hears of requests, by their number."""

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
        self._ended: tuple[int, Ended] = 0, Ended(0.0, 0.0, None)
        """The last one that did, and what the fleet knows of it."""

    def sent(self, number: int, decision: Decision) -> bool:
        """A request was sent; returns whether its answer is read, if that is streamed."""
        ticket = self.fleet.dispatch(decision.replica, decision.profile, decision.cached)
        self._tickets[number] = ticket
        self.fleet.sessions.saw(decision.profile.session, decision.replica)
        profile = decision.profile
        chunks, teaches = decision.prediction.output_tokens, self.fleet.teaches(ticket)
        return profile.stream and self._reader.reads(self._clock(), chunks, teaches)

    def moved(self, number: int, replica: str, prefix: Prefix) -> None:
        """It is served by another replica than it was sent to."""
        self.fleet.move(self._tickets[number], replica, prefix)

    def first_token(self, number: int) -> None:
        """Its first token was seen."""
        self.fleet.first_token(self._tickets[number])

    def ended(self, served: Served, prefilled: bool) -> None:
        """Its stream is over."""
        if served.watched and served.profile.stream:
            expected = served.decision.prediction.output_tokens
            self._reader.came(served.sequence.output_tokens, expected)
        ticket = self._tickets.pop(served.number)
        self._ended = served.number, self.fleet.release(ticket, prefilled)

    def learn(self, served: Served) -> None:
        """It has just ended."""
        number, ended = self._ended
        assert number == served.number
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

    def answered(self, replica: str, well: bool) -> None:
        """Response headers came from a replica, or none and an error."""
        if well:
            self.fleet.eligibility.answered(replica)
        else:
            self.fleet.eligibility.failed(replica)


News = Callable[[Node], object]


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

    def decide(
        self,
        number: int,
        profile: RequestProfile,
        prefix: Sequence[int],
        among: frozenset[str] | None = None,
    ) -> Decision | None:
        """The decision of a router drawn at random; ``among``: the only replicas to choose from."""
        owner = self._owner[number] = self._random.choice(self.nodes)
        return owner.router.decide(profile, among=among)

    def owner(self, number: int) -> Node:
        """The router that a request came to."""
        return self._owner[number]

    def tell(self, number: int, news: News) -> None:
        """Tells the router of a request at once."""
        news(self._owner[number])

    def learn(self, served: Served) -> None:
        """Its own router learns from it."""
        self._owner[served.number].learn(served)

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
