"""Discrete-event simulation: production routers with simulated engines."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import merge
from itertools import accumulate, chain, count, repeat
from operator import attrgetter, itemgetter

from extproc.lab.replay import Traced
from extproc.lab.replay.machine import Machine, MachinePoller
from extproc.lab.replay.routers import Arrival, Failed, RouterNode, Routers, Served, VirtualClock
from extproc.lab.simulator.steps import StepOutcome
from extproc.request.errors import Refusal
from extproc.route.decision import Decision
from extproc.route.queue import SWEEP_EVERY_S
from extproc.route.waiting import Waiting

_LONGEST_DRAIN = 7200.0  # seconds from the last arrival until every request must have ended

Event = tuple[float, Callable[[], None]]  # time and action


class Simulation(ABC):
    """Replicas and routers under a virtual clock. Subclasses define the requests."""

    def __init__(
        self,
        machines: Mapping[str, Machine],
        pollers: Collection[MachinePoller],
        routers: Routers,
        clock: VirtualClock,
        poll_s: float,
        queueing: bool,
        events: Iterable[Event],
    ) -> None:
        """``queueing``: requests may wait at the router."""
        self.machines = machines
        self.clock = clock
        self.failed: list[Failed] = []  # requests without a complete answer
        self._pollers = pollers
        self._routers = routers
        self._poll_s = poll_s
        self._queueing = queueing
        self._events = sorted(events, key=itemgetter(0))
        self._arrived = 0  # requests that have arrived
        self._open: dict[int, Served] = {}  # dispatched requests, by number
        self._requests: dict[int, Served] = {}  # by sequence id
        self._ids = count(1)  # of sequences
        self._sweep_at = 0.0

    @property
    def _queued(self) -> int:
        return sum(len(node.queue) for node in self._routers.nodes)

    @abstractmethod
    def _arrival(self, number: int, traced: Traced) -> Arrival:
        """Request as the router and the engines see it."""

    def run(self, trace: Sequence[Traced]) -> Iterator[Served]:
        """Play the trace; yield each answered request at its end.

        Raises:
            ValueError: requests have not ended two hours after the last arrival.
        """
        last = trace[-1].at if trace else 0.0
        last_event = self._events[-1][0] if self._events else 0.0
        polls: Iterator[Event] = zip(
            accumulate(repeat(self._poll_s), initial=0.0), repeat(self._poll)
        )
        arrivals: Iterator[Event] = ((traced.at, partial(self._arrive, traced)) for traced in trace)
        # At equal times, events come before polls, and polls before arrivals.
        for now, act in merge(self._events, polls, arrivals, key=itemgetter(0)):
            if self._arrived == len(trace) and not (self._open or self._queued):
                return
            yield from self._advance(now)
            act()
            if self._arrived == len(trace) and now >= last_event:
                self._give_up_on_hung()
            if now > last + _LONGEST_DRAIN:
                raise ValueError(
                    f"{len(self._open) + self._queued} requests have not ended "
                    f"{_LONGEST_DRAIN / 3600.0:g} hours after the last arrival: the replicas are "
                    "overloaded. Try less traffic, or more or faster replicas"
                )

    def _arrive(self, traced: Traced) -> None:
        self._arrived += 1
        arrival = self._arrival(self._arrived, traced)
        decision = self._routers.decide(arrival)
        if decision and self._queueing and not self._routers.owner(arrival).queue.admit(decision):
            self._enqueue(arrival, decision)
        else:
            self._dispatch(arrival, decision)

    def _enqueue(self, arrival: Arrival, decision: Decision) -> None:
        node, profile = self._routers.owner(arrival), decision.profile

        def resolve(outcome: Decision | Exception | None) -> None:
            if isinstance(outcome, Exception) and not isinstance(outcome, Refusal):
                raise outcome
            self._dispatch(arrival, outcome if isinstance(outcome, Decision) else None)

        node.queue.enter(
            Waiting(
                profile,
                decision,
                since=self.clock(),
                decide=lambda place: node.router.decide(profile, place=place),
                resolve=resolve,
            )
        )

    def _dispatch(self, arrival: Arrival, decision: Decision | None) -> None:
        if decision is None:
            self.failed.append(Failed(arrival.traced, "", self.clock()))
            return
        visible = not decision.profile.stream
        served = Served(arrival, decision, visible, decision.replica, self.clock())
        self._open[served.number] = served
        self._routers.notify(served, RouterNode.sent)
        self._send(served)

    def _send(self, served: Served) -> None:
        machine = self.machines[served.replica]
        served.sequences = served.arrival.sequences(machine.engine.pool.block_size)
        if not machine.up:
            self._retry(served)
            return
        served.frontend = machine.engine.step_model.frontend
        try:
            for sequence in served.sequences:
                sequence.id = next(self._ids)
                self._requests[sequence.id] = served
                machine.engine.add(sequence, self.clock())
        except ValueError:  # does not fit into the KV cache: the replica refuses it
            self._answer(served, ok=True)
            self._fail(served)
            return
        if served.profile.stream and not machine.hung:
            self._answer(served, ok=True)  # response headers precede the first token

    def _retry(self, served: Served) -> None:
        """Retries a request on its second choice; fails a request that was answered or retried."""
        second = served.decision.second
        if served.answered or second is None or second == served.replica:
            self._fail(served)
            return
        served.replica = second
        served.first_token = None
        self._send(served)

    def _fail(self, served: Served) -> None:
        self._answer(served, ok=False)
        self._routers.notify(served, RouterNode.ended)
        del self._open[served.number]
        self.failed.append(Failed(served.traced, served.replica, self.clock()))

    def _answer(self, served: Served, ok: bool) -> None:
        """Tells the router, once, whether the replica answered the request (``ok``) or failed."""
        if served.answered:
            return
        served.answered = True
        if served.replica != served.decision.replica:
            self._routers.notify(served, RouterNode.retried)
        self._routers.notify(served, RouterNode.answered if ok else RouterNode.failed)

    def _give_up_on_hung(self) -> None:
        """Fails all requests in flight if each is on a replica that hangs."""
        if all(self.machines[served.replica].hung for served in self._open.values()):
            for served in list(self._open.values()):
                self._fail(served)

    def _advance(self, until: float) -> Iterator[Served]:
        """Runs all engines up to ``until``, one step at a time while requests wait at routers."""
        machines = self.machines.values()
        while self._queued and (step_ends := min(each.step_ends_at for each in machines)) < until:
            yield from self._run_engines(step_ends)
            if step_ends >= self._sweep_at:
                self._sweep_at = step_ends + SWEEP_EVERY_S
                for node in self._routers.nodes:
                    node.queue.sweep()
        yield from self._run_engines(until)

    def _run_engines(self, until: float) -> Iterator[Served]:
        found = chain.from_iterable(machine.advance(until) for machine in self.machines.values())
        for outcome in sorted(found, key=attrgetter("ends_at")):
            self._routers.deliver(outcome.ends_at)
            self.clock.time = outcome.ends_at
            yield from self._handle(outcome)
        self._routers.deliver(until)
        self.clock.time = until

    def _handle(self, outcome: StepOutcome) -> Iterator[Served]:
        for sequence in outcome.prefilled:
            served = self._requests[sequence.id]
            if served.first_token is None:  # otherwise the sequence was preempted before
                served.first_token = self.clock()
                if served.profile.stream:
                    self._answer(served, ok=True)
                    self._routers.notify(served, RouterNode.first_token)
        for sequence in outcome.finished:
            served = self._requests.pop(sequence.id)
            if not any(other.id in self._requests for other in served.sequences):
                del self._open[served.number]
                served.finished = self.clock()
                self._answer(served, ok=True)
                self._routers.notify(served, RouterNode.ended)
                yield served

    def _poll(self) -> None:
        for poller in self._pollers:
            state = poller.poll(self.clock())
            if state is not None:
                self._routers.publish(state)
