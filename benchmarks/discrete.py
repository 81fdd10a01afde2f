"""Discrete-event simulation: the production router against the simulator's engines."""

from collections.abc import Iterator
from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field
from math import inf
from random import Random

import numpy as np

from benchmarks.clock import VirtualClock
from benchmarks.fleet import FleetEvent, FleetFile
from benchmarks.machine import Machine
from benchmarks.oracle import Oracle
from benchmarks.polling import MODEL, Watch, poll_interval
from benchmarks.routers import News, Node, Routers
from benchmarks.served import Arrival, Failed, Served
from benchmarks.speeds import Speeds
from benchmarks.trace import ID_TOKENS, TracedRequest
from extproc.fleet.fleet import Fleet
from extproc.hold.queue import LET_GO_EVERY_S
from extproc.hold.waiting import Waiting
from extproc.predict.lengths import OutputLengths
from extproc.predict.typical import Typical
from extproc.request.objective import NO_OBJECTIVE, Objective
from extproc.request.prefix import Prefix
from extproc.request.profile import Endpoint, RequestProfile
from extproc.route.router import Decision
from extproc.simulator.blocks import trace_hashes
from extproc.simulator.sequence import Sequence
from extproc.simulator.steps import Outcome

KNOWN = ("lengths", "coefficients")
STREAMED = 0.5
"""Share of requests that are streamed."""
_URGENT = Objective("urgent", priority=1)
_LONGEST_DRAIN = 7200.0
"""Seconds after the last request in which all must have ended."""


@dataclass
class Simulation:
    """One policy, or the oracle, on one fleet and one trace."""

    fleet_file: FleetFile
    policy: str
    """Name of a policy, or ``oracle``."""
    poll_interval: float | None = None
    """Seconds between two scrapes of a replica; None: as usual with the policy."""
    seed: int = 0
    know: frozenset[str] = frozenset()
    """Which of ``KNOWN`` the router is told, though production would not know it."""
    profile_error: float = 1.0
    """How many times as long as in truth a step takes by the profile the router starts from."""
    routers: int = 1
    share_lag: float | None = None
    """Seconds that a router's digest takes to the others; None: it never arrives."""
    weight: float = 1.0
    """The oracle's, of the cost to others."""
    hold: bool = False
    """Whether requests wait at the router while no replica can carry them."""
    urgent: float = 0.0
    """Share of the requests that go before others where they wait."""
    target: Objective = NO_OBJECTIVE
    """What others aim for."""
    target_share: float = 1.0
    """Of these requests, so many do, drawn."""
    ignore_targets: bool = False
    """Whether the router is told of none."""
    tenants: PySequence[float] = ()
    """Of how many of the requests each tenant has one; none: all are one's."""
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._groups = Random(f"{self.seed} groups")
        self._poll_s = self.poll_interval or poll_interval(self.policy)
        self.machines = {
            name: Machine(name, profile, self.fleet_file.group(name), self.seed)
            for name, profile in self.fleet_file.members.items()
        }
        self.nodes: list[Node] = []
        self._watches: list[Watch] = []
        self._routers: Routers | None = None
        self._deciding: Routers | Oracle
        if self.policy == "oracle":
            self.know = frozenset(KNOWN)
            self._deciding = Oracle(self.machines, self.weight, self.clock, self.seed)
        else:
            self.nodes = [self._node(number) for number in range(self.routers)]
            typical, dealt = Typical(), Random(self.seed)
            self._watches = [self._watch(one, typical) for one in self.machines.values()]
            self._routers = Routers(self.nodes, self.share_lag, self.clock, dealt)
            self._deciding = self._routers
        self._events = sorted(self.fleet_file.events, key=lambda event: event.at, reverse=True)
        self._poll_at = 0.0
        self.speeds = Speeds()
        """What was learned of replicas whose speed changed."""
        self._sent = 0
        self._open: dict[int, Served] = {}
        self._look_at = 0.0
        self._held = 0
        """Requests that wait at the routers."""
        self.failed: list[Failed] = []
        """Requests that got no whole answer."""

    @property
    def fleet(self) -> Fleet:
        """The first router's."""
        return self.nodes[0].fleet

    def run(self, trace: PySequence[TracedRequest]) -> Iterator[Served]:
        """Plays the trace; yields every request that was answered when it has finished."""
        last = trace[-1].at if trace else 0.0
        arrivals = iter(trace)
        upcoming = next(arrivals, None)
        while upcoming is not None or self._open or self._held:
            arrives_at = upcoming.at if upcoming is not None else inf
            happens_at = self._events[-1].at if self._events else inf
            now = min(arrives_at, happens_at, self._poll_at)
            yield from self._advance(now)
            if now == happens_at:
                self._happen(self._events.pop())
            elif now == self._poll_at:
                self._poll()
            elif upcoming is not None:
                self._arrive(upcoming)
                upcoming = next(arrivals, None)
            if upcoming is None:
                self._give_up_on_hung()
            if now > last + _LONGEST_DRAIN:
                raise RuntimeError(f"{len(self._open)} requests do not end")

    # -- requests ---------------------------------------------------------------------------

    def _arrive(self, traced: TracedRequest) -> None:
        number = self._sent = self._sent + 1
        streamed = self._random.random() < STREAMED
        known = "lengths" in self.know
        profile = RequestProfile(
            Endpoint.CHAT,
            MODEL,
            traced.prompt_tokens,
            traced.prompt_tokens * 4,
            output_bound=traced.output_tokens if known else traced.max_tokens,
            stream=streamed,
            least_output=traced.output_tokens if known else 0,
            prefix=Prefix(np.array(traced.hash_ids, np.uint64), ID_TOKENS, traced.prompt_tokens),
            tenant=self._tenant(),
        )
        objective = self._objective()
        if not (self.ignore_targets and objective.has_target):
            profile.objective = objective
        sequence = self._sequence(number, traced, objective.priority)
        arrival = Arrival(number, traced, sequence, objective)
        decision = self._deciding.decide(number, profile, arrival.sequence.hashes)
        if not (self.hold and self._routers and decision):
            self._begin(arrival, decision)
            return
        node = self._routers.owner(number)
        if node.queue.keeps(decision):
            self._wait(node, arrival, decision)
        else:
            self._begin(arrival, decision)

    def _objective(self) -> Objective:
        if self._groups.random() < self.urgent:
            return _URGENT
        aims = self.target.has_target and self._groups.random() < self.target_share
        return self.target if aims else NO_OBJECTIVE

    def _tenant(self) -> str:
        if not self.tenants:
            return ""
        (number,) = self._groups.choices(range(len(self.tenants)), self.tenants)
        return f"tenant {number + 1}"

    def _wait(self, node: Node, arrival: Arrival, decision: Decision) -> None:
        def go(outcome: Decision | Exception | None) -> None:
            if isinstance(outcome, Exception):
                raise outcome
            self._held -= 1
            self._begin(arrival, outcome)

        self._held += 1
        profile, now = decision.profile, self.clock()

        def decide() -> Decision | None:
            return node.router.decide(profile, waited=self.clock() - now)

        node.queue.enter(Waiting(decision, now, decide, go))

    def _begin(self, arrival: Arrival, decision: Decision | None) -> None:
        number, traced = arrival.number, arrival.traced
        if decision is None:
            self.failed.append(Failed(traced, "", self.clock()))
            return
        whole = not decision.profile.stream
        sequence, aim, now = arrival.sequence, arrival.objective, self.clock()
        served = Served(number, traced, decision, whole, decision.replica, sequence, aim, now)
        self._open[number] = served

        def sent(node: Node) -> None:
            served.watched |= node.sent(number, decision)

        self._tell(served, sent)
        self._send(served)

    def _sequence(self, number: int, traced: TracedRequest, priority: int) -> Sequence:
        block = next(iter(self.machines.values())).engine.pool.block_size
        hashes = trace_hashes(traced.hash_ids, traced.prompt_tokens, ID_TOKENS, block)
        return Sequence(
            number, traced.prompt_tokens, traced.output_tokens, hashes, priority=-priority
        )

    def _send(self, served: Served) -> None:
        machine = self.machines[served.replica]
        if not machine.up:
            self._retry(served)
            return
        try:
            machine.add(served.sequence, self.clock())
        except ValueError:  # longer than the replica's context
            self._answer(served, well=True)
            self._fail(served)
            return
        if served.profile.stream and not machine.hung:
            self._answer(served, well=True)  # headers come at once, only tokens take time

    def _retry(self, served: Served) -> None:
        """Its replica is gone; Envoy tries the second choice, once and only before an answer."""
        second = served.decision.second
        if served.answered or served.retried or second is None:
            self._fail(served)
            return
        served.retried = True
        served.replica = second
        served.first_token = None
        priority = served.profile.priority
        served.sequence = self._sequence(served.number, served.traced, priority)
        self._send(served)

    def _fail(self, served: Served) -> None:
        if not served.answered:
            self._answer(served, well=False)
        seen = served.watched and served.profile.stream and served.first_token is not None
        self._tell(served, lambda node: node.ended(served, prefilled=seen))
        del self._open[served.number]
        self.failed.append(Failed(served.traced, served.replica, self.clock()))

    def _answer(self, served: Served, well: bool) -> None:
        """Response headers pass; they say which replica it was in the end."""
        if served.answered:
            return
        served.answered = True
        replica, chosen = served.replica, served.decision.replica
        if replica != chosen:
            self._tell(served, lambda node: node.answered(chosen, well=False))
            prefix = served.profile.prefix
            self._tell(served, lambda node: node.moved(served.number, replica, prefix))
        self._tell(served, lambda node: node.answered(replica, well))

    def _tell(self, served: Served, news: News) -> None:
        """The oracle need not be told."""
        if self._routers:
            self._routers.tell(served.number, news)

    def _deliver(self, until: float) -> None:
        if self._routers:
            self._routers.deliver(until)

    def _give_up_on_hung(self) -> None:
        """The last requests wait for replicas that never come back."""
        if not self._events and all(self.machines[s.replica].hung for s in self._open.values()):
            for served in list(self._open.values()):
                self._fail(served)

    # -- replicas ---------------------------------------------------------------------------

    def _happen(self, event: FleetEvent) -> None:
        machine = self.machines[event.replica]
        machine.happen(event, self.clock())
        if event.slow is not None and self.nodes:
            self.speeds.changed(machine, event.slow, self.clock())
        if event.do == "down":
            for served in list(self._open.values()):
                if served.replica == machine.name:
                    self._retry(served)

    def _advance(self, until: float) -> Iterator[Served]:
        """Runs every engine up to a time; the routers hear of what happened in its order."""
        while self._held and (step_ends := self._next_step()) < until:
            yield from self._advance_at_once(step_ends)
            self._look(step_ends)
        yield from self._advance_at_once(until)

    def _look(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = now + LET_GO_EVERY_S
            for node in self.nodes:
                node.queue.look()

    def _next_step(self) -> float:
        """When the next step of any engine ends."""
        ends = (machine.step_ends_at for machine in self.machines.values())
        return min((end for end in ends if end is not None), default=inf)

    def _advance_at_once(self, until: float) -> Iterator[Served]:
        happened = [pair for machine in self.machines.values() for pair in machine.advance(until)]
        happened.sort(key=lambda pair: pair[0])
        for at, outcome in happened:
            self._deliver(at)
            self.clock.time = at
            yield from self._hear(outcome)
        self._deliver(until)
        self.clock.time = until

    def _hear(self, outcome: Outcome) -> Iterator[Served]:
        for sequence in outcome.prefilled:
            self._first_token(self._open[sequence.id])
        for sequence in outcome.finished:
            served = self._open.pop(sequence.id)
            self._finish(served)
            yield served
            self._let_go(served)

    def _let_go(self, served: Served) -> None:
        self._tell(served, lambda node: node.queue.let_go(served.replica))

    def _first_token(self, served: Served) -> None:
        if served.first_token is not None:
            return  # it was preempted since
        served.first_token = self.clock()
        if served.profile.stream:
            self._answer(served, well=True)
            if served.watched:
                self._tell(served, lambda node: node.first_token(served.number))

    def _finish(self, served: Served) -> None:
        served.finished = self.clock()
        self._answer(served, well=True)
        self._tell(served, lambda node: node.ended(served, prefilled=served.watched))
        self._deciding.learn(served)

    def _poll(self) -> None:
        now = self.clock()
        for watch in self._watches:
            state = watch.poll(now)
            if state is not None and self._routers:
                self._routers.publish(state)
        if now >= self.speeds.due:
            self.speeds.compare(now, self.fleet.view(MODEL))
        self._poll_at += self._poll_s

    def _node(self, number: int) -> Node:
        random = Random(self.seed + 1000 * number)
        return Node(Fleet(OutputLengths(), self.clock, self.clock), self.policy, random, self.clock)

    def _watch(self, machine: Machine, typical: Typical) -> Watch:
        known = "coefficients" in self.know
        profile = self.fleet_file.believed[machine.name]
        believed = None if known else profile.step.slowed(self.profile_error)
        return Watch(machine, believed, typical, self._poll_s, Random(self.seed))
