"""Exclusions never stop all requests: random events on a virtual clock."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config import HoldSettings
from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.request.endpoint import Endpoint
from extproc.request.profile import RequestProfile
from extproc.route.decision import Decision
from extproc.route.queue import Queue
from extproc.route.router import Router
from extproc.route.waiting import Place, Waiting
from tests.examples import examples
from tests.fakes import A10, MODEL, ManualClock, fleet_of, replica, state

REPLICAS = (1, 2, 3, 4)
MOST_S = 10.0  # seconds within which a request is dispatched
STEP_S = 0.5

GAUGES = st.fixed_dictionaries(
    {},
    optional={
        "healthy": st.booleans(),
        "draining": st.booleans(),
        "asleep": st.booleans(),
        "unanswered_s": st.sampled_from((0.0, 2.0)),
        "running": st.sampled_from((0, 40)),
        "waiting": st.sampled_from((0, 20)),
        "kv_usage": st.sampled_from((0.0, 0.9, 1.0)),
    },
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from((REPLICAS, *((number,) for number in REPLICAS))),
        st.one_of(GAUGES, st.sampled_from(("fails", "full", "answers", "silent", "ends"))),
        st.sampled_from((0.0, 0.1, 1.0, 4.0)),
    ),
    max_size=25,
)


class RouterUnderEvents:
    """Router with its queue, and replicas with arbitrary polled figures."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fleet: Fleet = fleet_of(self.clock, *[A10] * len(REPLICAS))
        self.queue = Queue(self.fleet, HoldSettings())
        self.router = Router(self.fleet, "completion", Random(1), backlog=self.queue.backlog)
        self.gauges: dict[int, dict[str, float]] = {number: {} for number in REPLICAS}
        self.silent: set[int] = set()
        self.on: list[tuple[str, Ticket]] = []
        self.dispatched = 0

    def happens(self, number: int, event: "str | dict[str, float]") -> None:
        match event:
            case dict():
                self.gauges[number] = event
                self.silent.discard(number)
            case "silent":
                self.silent.add(number)
            case "answers":
                self.fleet.eligibility.succeeded(replica(number))
            case "ends" if self.on:
                where, ticket = self.on.pop(0)
                self.fleet.release(ticket)
                self.queue.request_ended(where)
            case "fails" | "full":
                for _ in range(3):
                    self.fleet.eligibility.failed(replica(number), unavailable=event == "full")

    def pass_s(self, seconds: float) -> None:
        end = self.clock() + seconds
        while True:
            for number in REPLICAS:
                if number not in self.silent:
                    figures = {"kv_tokens": 42_000, "measured": True} | self.gauges[number]
                    self.fleet.put(state(number, A10, self.clock, **figures))
            self.queue.sweep()
            if self.clock() >= end:
                return
            self.clock.advance(min(STEP_S, end - self.clock()))

    def come(self) -> None:
        profile = RequestProfile(Endpoint.CHAT, MODEL, 24_000, 24_000, 100)
        decision = self.router.decide(profile)
        if decision is not None and self.queue.admit(decision):
            self.send(decision)
            return

        def decide(place: Place) -> Decision | None:
            return self.router.decide(profile, place=place)

        def go(outcome: Decision | Exception | None) -> None:
            if isinstance(outcome, Decision):
                self.send(outcome)

        self.queue.enter(Waiting(profile, decision, self.clock(), decide, go))

    def send(self, decision: Decision) -> None:
        self.dispatched += 1
        self.on.append((decision.replica, self.fleet.dispatch(decision.replica, decision.profile)))

    @property
    def ejected(self) -> int:
        return sum(name == "failing" for name, _ in self.fleet.eligibility.exclusions().values())

    @property
    def answering(self) -> bool:
        """True if a replica is polled that neither drains nor sleeps."""
        return any(
            not (figures.get("draining") or figures.get("asleep"))
            for number, figures in self.gauges.items()
            if number not in self.silent
        )


@settings(max_examples=examples(60))
@given(EVENTS)
def test_some_request_is_dispatched_in_any_10_s_without_progress(
    events: "list[tuple[tuple[int, ...], str | dict[str, float], float]]",
) -> None:
    world = RouterUnderEvents()
    for numbers, event, seconds in events:
        world.come()
        for number in numbers:
            world.happens(number, event)
        world.pass_s(seconds)
        assert world.ejected <= len(REPLICAS) // 2
    for _ in range(6):
        world.come()
    if world.answering and len(world.queue):
        before = world.dispatched
        world.pass_s(MOST_S)
        assert world.dispatched > before
