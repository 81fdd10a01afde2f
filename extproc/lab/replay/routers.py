"""Requests of a simulation, and its routers."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from math import inf
from random import Random

from extproc.config import Config
from extproc.fleet.announcements import SentPrompt
from extproc.fleet.digest import EVERY_S, Digest
from extproc.fleet.ledger import Ticket
from extproc.lab.replay import Traced
from extproc.lab.simulator.steps import Sequence as EngineSequence
from extproc.proxy.services import CHUNKS_SAVED_S, RESERVED_FOR_ADAPTERS, Budget, routing
from extproc.replica_state import ReplicaState
from extproc.request.objective import Objective
from extproc.request.profile import RequestProfile
from extproc.route.decision import Decision
from extproc.share.digests import DIGEST
from extproc.share.envelope import Skips


@dataclass(eq=False, slots=True)
class VirtualClock:
    """Clock whose time the simulation sets."""

    time: float = 0.0

    def __call__(self) -> float:
        return self.time


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request that arrived at the router."""

    number: int
    traced: Traced
    profile: RequestProfile  # as the router sees the request
    objective: Objective  # true objective, which the router may not know
    sequences: Callable[[int], list[EngineSequence]]
    """Creates the sequences of the request; the argument is the number of tokens in a KV block."""
    among: frozenset[str] | None = None  # replicas that may serve the request; None: all


@dataclass(slots=True)
class Served:
    """Request that was dispatched to a replica."""

    arrival: Arrival
    decision: Decision
    response_visible: bool  # the router reads the response's chunks
    replica: str  # serves the request; after a retry the second choice
    sent: float  # time of the dispatch
    ticket: Ticket = field(init=False)  # in the ledger of its router
    counted: bool = False  # its chunks count against the router's budget
    sequences: list[EngineSequence] = field(default_factory=list)  # on the replica
    frontend: float = 0.0  # seconds on the replica outside the engine's steps
    answered: bool = False  # outcome reported to the router; no retry after that
    first_token: float | None = None
    finished: float | None = None  # time of the complete answer; None: unfinished or failed

    @property
    def number(self) -> int:
        return self.arrival.number

    @property
    def traced(self) -> Traced:
        return self.arrival.traced

    @property
    def sequence(self) -> EngineSequence:
        return self.sequences[0]

    @property
    def profile(self) -> RequestProfile:
        return self.decision.profile

    @property
    def prefill_seen(self) -> bool:
        """True if the router saw that the prompt was prefilled."""
        first_seen = self.profile.stream and self.first_token is not None
        return self.response_visible and (first_seen or self.finished is not None)

    @property
    def ttft(self) -> float:
        """Seconds from the arrival to the first token."""
        assert self.first_token is not None
        return self.first_token - self.traced.at + self.frontend

    @property
    def completion(self) -> float:
        assert self.finished is not None
        return self.finished - self.traced.at + self.frontend

    @property
    def queued_s(self) -> float:
        """Seconds in the router's queue."""
        return self.sent - self.traced.at


@dataclass(frozen=True, slots=True)
class Failed:
    """Request without a complete answer."""

    traced: Traced
    replica: str  # last replica; empty: never dispatched
    at: float


class RouterNode:
    """Router of the simulation, with a callback for each event of a request."""

    def __init__(self, config: Config, random: Random, clock: VirtualClock) -> None:
        self.queue, self.router = routing(config, random, clock, clock)
        self.fleet = self.router.fleet
        self._chunks = Budget(config.serve.chunks_per_s, CHUNKS_SAVED_S)
        self._clock = clock

    def sent(self, served: Served) -> None:
        """Enter a dispatched request into the ledger, and decide whether to read its stream."""
        decision, profile = served.decision, served.profile
        served.ticket = self.fleet.dispatch(decision.replica, profile, decision.cached)
        self.fleet.sessions.record(profile.session, decision.replica)
        if profile.stream:
            chunks = decision.prediction.output_tokens
            served.counted = self._chunks.takes(self._clock(), chunks, RESERVED_FOR_ADAPTERS)
            needed = not served.counted and self.fleet.speeds.takes_stream(decision.replica)
            served.response_visible = served.counted or needed

    def retried(self, served: Served) -> None:
        """Move a request from the first choice, which failed, to the replica that answers."""
        self.fleet.eligibility.failed(served.decision.replica)
        self.fleet.move(served.ticket, served.replica, served.profile.prefix)

    def answered(self, served: Served) -> None:
        self.fleet.eligibility.succeeded(served.replica)

    def failed(self, served: Served) -> None:
        self.fleet.eligibility.failed(served.replica)

    def first_token(self, served: Served) -> None:
        if served.response_visible:
            self.fleet.first_token(served.ticket)
            forecast = served.decision.forecast()
            ttft = self._clock() - served.sent + served.frontend
            self.router.learn_first_token(forecast, served.replica, ttft)

    def ended(self, served: Served) -> None:
        """Release a request; learn from its answer, and offer its place to queued requests."""
        tokens, streamed = served.sequence.output_tokens, served.profile.stream
        if served.counted:
            self._chunks.spend(tokens - served.decision.prediction.output_tokens)
        ended = self.fleet.release(served.ticket, served.prefill_seen)
        forecast, replica = served.decision.forecast(), served.replica
        if served.finished is None:
            return
        if served.response_visible:
            completion = served.completion - served.queued_s
            if replica == forecast.replica:
                error = self.router.error_quantiles.completion
                error.observe(forecast.predicted_completion, completion)
            ttft = served.ttft - served.queued_s if streamed else None
            self.router.learn(forecast, replica, tokens, completion, ttft)
        else:
            self.router.learn_counted(forecast, replica, ended, None)
        self.queue.request_ended(replica)


RouterEvent = Callable[[RouterNode, Served], None]


class Routers:
    """Routers that receive the same polls, and each other's digests with a delay. Each request goes
    to a random router."""

    def __init__(
        self,
        nodes: Sequence[RouterNode],
        share_lag: float | None,
        clock: VirtualClock,
        random: Random,
        entries: Sequence[RouterNode] = (),
    ) -> None:
        """
        Args:
            nodes: all routers.
            share_lag: seconds until a digest reaches the other routers; None: routers share
                nothing.
            clock: clock of the simulation.
            random: source of the draws.
            entries: routers from which each request draws one: a router that occurs twice gets
                twice as many requests; empty: ``nodes``.
        """
        self.nodes = nodes
        self._entries = entries or nodes
        self._share_lag = None if len(nodes) == 1 else share_lag
        self._next = cycle(nodes)
        self._due_at = 0.0
        self._clock = clock
        self._random = random
        self._owner: dict[int, RouterNode] = {}
        self._under_way: deque[tuple[float, Digest | None, str, list[SentPrompt]]] = deque()

    def decide(self, arrival: Arrival) -> Decision | None:
        """Return the decision of a random router; None if no replica can be used."""
        owner = self._owner[arrival.number] = self._random.choice(self._entries)
        return owner.router.decide(arrival.profile, among=arrival.among)

    def owner(self, arrival: Arrival) -> RouterNode:
        return self._owner[arrival.number]

    def notify(self, served: Served, event: RouterEvent) -> None:
        event(self._owner[served.number], served)

    def publish(self, state: ReplicaState) -> None:
        for node in self.nodes:
            node.fleet.put(state)

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
                due = fleet.digests.due(at)
                prompts = [*chain.from_iterable(iter(fleet.prompt_log.take, ()))]
                digest = due and Skips().open(fleet.router, DIGEST.seal(due), DIGEST)
                if digest or prompts:
                    arrives_at = at + self._share_lag
                    self._under_way.append((arrives_at, digest, fleet.router, prompts))
