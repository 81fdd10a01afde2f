"""Each guarantee at the top of :mod:`extproc.route.queue` holds for random requests and replicas,
and its check fails on a fault in the queue."""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from statistics import fmean
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from extproc.config import HoldSettings
from extproc.fleet.ledger import Ticket
from extproc.fleet.peers import Peers
from extproc.request.endpoint import Endpoint
from extproc.request.errors import Saturated
from extproc.request.objective import Objective
from extproc.request.profile import RequestProfile
from extproc.route import queue, router
from extproc.route.backlog import LEAD_S, Backlog
from extproc.route.decision import Decision
from extproc.route.order import Shares
from extproc.route.queue import Queue
from extproc.route.router import Router
from extproc.route.turns import Turns
from extproc.route.waiting import ANEW_S, OVERTAKEN_S, Place, Waiting
from extproc.share.digests import DIGEST
from extproc.share.envelope import Skips
from tests.fakes import A10, MODEL, ManualClock, decided, fleet_of, replica, state

KV_TOKENS = 42_000
STEP_S = 0.05  # of the virtual clock: the period of the sweeps
POLL_S = 0.2
SETTLED_S = 1.0 + ANEW_S + 2 * STEP_S  # in which each replica is offered to queued requests
OTHER, ADAPTER = "other", "adapter"
MODELS = (MODEL,), (OTHER,), (MODEL, OTHER, ADAPTER)  # by replica


@dataclass(frozen=True)
class OfferedRequest:
    gap_s: float = 0.0  # after the previous request
    prompt: int = 20_000
    answer: int = 100
    tenant: str = ""
    priority: int = 0
    model: str = MODEL
    router: int = 0
    leaves_s: float = inf  # after its arrival
    breaks: bool = False  # deciding it anew raises
    slower: float = 1.0  # service time ÷ prediction


@dataclass
class DecidedRequest:
    """Last decision about a request, and the queue of its router at that time."""

    request: OfferedRequest
    since: float
    decision: Decision
    queued: list[tuple[Waiting, int | None]]  # with the row that each request waits for
    room: Decision | None  # of a router with an empty queue; for arrivals only

    @property
    def row(self) -> int:
        return int(self.decision.situation.view.rows[self.decision.choice.first])


class LowestIndex(random.Random):
    """Random numbers that are 0, so that earlier decisions do not change how ties are broken."""

    def randrange(self, *_: Any, **__: Any) -> int:
        return 0


class RouterWithQueue:
    def __init__(
        self, clock: ManualClock, models: Iterable[tuple[str, ...]], policy: str, **limits: Any
    ) -> None:
        self.fleet = fleet_of(clock, *[A10 for _ in models])
        self.queue = Queue(self.fleet, HoldSettings.model_validate(limits))
        self.router = Router(self.fleet, policy, LowestIndex(), backlog=self.queue.backlog)
        self.room = Router(self.fleet, policy, LowestIndex(), backlog=Backlog(clock()))
        self.last: dict[Waiting, DecidedRequest] = {}
        self.could_start_since: dict[Waiting, float] = {}


@dataclass
class SharedReplicas:
    """Routers that share replicas; a request takes ``slower`` times the predicted time."""

    models: tuple[tuple[str, ...], ...] = MODELS
    routers: int = 2
    policy: str = "completion"
    limits: dict[str, Any] = field(default_factory=dict)
    frozen: dict[str, Any] | None = None  # gauges of all replicas, whatever is there

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.nodes = [
            RouterWithQueue(self.clock, self.models, self.policy, **self.limits)
            for _ in range(self.routers)
        ]
        self.numbers = count()
        self.ends: list[tuple[float, int, RouterWithQueue, str, Ticket]] = []
        self.leaving: list[tuple[float, int, RouterWithQueue, Waiting]] = []
        self.arrived: list[DecidedRequest] = []
        self.sent: list[DecidedRequest] = []  # dispatched ones, as decided
        self.sent_at: list[float] = []
        self.refused: list[tuple[OfferedRequest, Exception, Decision | None]] = []
        self.left: list[tuple[OfferedRequest, str]] = []  # with the replica that it waited for
        self.polled_at = -inf
        self.poll()

    def play(self, requests: Iterable[OfferedRequest], after_s: float = 8.0) -> "SharedReplicas":
        for request in requests:
            self.pass_s(request.gap_s)
            self.arrive(request)
        self.pass_s(after_s)
        return self

    def pass_s(self, seconds: float) -> None:
        until = self.clock() + seconds
        while self.clock() < until - 1e-9:
            self.clock.time = min(self.clock() + STEP_S, until)
            now = self.clock()
            self.share()
            while self.ends and self.ends[0][0] <= now:
                self.end()
            while self.leaving and self.leaving[0][0] <= now:
                _, _, node, entry = heappop(self.leaving)
                if entry in node.queue:
                    self.leave(node, entry)
            self.poll()
            for node in self.nodes:
                node.queue.sweep()
                self.observe(node, now)

    def end(self) -> None:
        _, _, node, where, ticket = heappop(self.ends)
        node.fleet.release(ticket)
        node.queue.request_ended(where)

    def leave(self, node: RouterWithQueue, entry: Waiting) -> None:
        self.left.append((node.last[entry].request, entry.replica))
        node.queue.abandon(entry)

    def share(self) -> None:
        for node in self.nodes:
            digest = node.fleet.digests.due(self.clock())
            if digest is not None:
                for other in self.nodes:
                    other.fleet.receive_digest(Skips().open("test", DIGEST.seal(digest), DIGEST))

    def poll(self) -> None:
        if self.clock() < self.polled_at + POLL_S - 1e-9:
            return
        self.polled_at = self.clock()
        for number, models in enumerate(self.models, start=1):
            name = replica(number)
            on = sum(node.fleet.in_flight_on(name) for node in self.nodes)
            figures: dict[str, Any] = {
                "running": on,
                "kv_usage": min(0.45 * on, 0.99),
                "steps": self.clock() * 20,
            }
            figures |= {"measured": True, "kv_tokens": KV_TOKENS, "max_loras": 1} | (
                self.frozen or {}
            )
            adapters = tuple(model for model in models if model == ADAPTER)
            polled = state(number, A10, self.clock, models=models, adapters=adapters, **figures)
            for node in self.nodes:
                node.fleet.put(polled)

    def node(self, request: OfferedRequest) -> RouterWithQueue:
        return self.nodes[request.router % self.routers]

    def arrive(self, request: OfferedRequest) -> Waiting | None:
        node, since = self.node(request), self.clock()
        profile = RequestProfile(
            *(Endpoint.CHAT, request.model, request.prompt, request.prompt, request.answer),
            tenant=request.tenant,
        )
        profile.least_output = request.answer
        profile.objective = Objective("", request.priority)
        seen = self.decide(node, request, profile, since)
        self.arrived.append(seen)
        if node.queue.admit(seen.decision):
            self.send(node, seen)
            return None

        def decide(place: Place) -> Decision | None:
            if request.breaks:
                raise RuntimeError("broken")
            node.last[entry] = self.decide(node, request, profile, since, place)
            return node.last[entry].decision

        def resolve(outcome: Decision | Exception | None) -> None:
            if isinstance(outcome, Exception):
                entry.last_chance = True
                last = node.router.decide(profile, place=entry)
                self.refused.append((request, outcome, last))
            else:
                self.send(node, node.last[entry])

        entry = Waiting(profile, seen.decision, since, decide, resolve)
        node.last[entry] = seen
        if 0.0 < request.leaves_s < inf:
            heappush(self.leaving, (since + request.leaves_s, next(self.numbers), node, entry))
        node.queue.enter(entry)
        if entry not in node.queue:
            return None
        if request.leaves_s == 0.0:
            self.leave(node, entry)
        return entry

    @staticmethod
    def decide(
        node: RouterWithQueue,
        request: OfferedRequest,
        profile: RequestProfile,
        since: float,
        place: Place | None = None,
    ) -> DecidedRequest:
        queued = [(entry, entry.row) for entry in node.queue if entry.profile is not profile]
        room = node.room.decide(profile) if place is None else None
        return DecidedRequest(request, since, decided(node.router, profile, place), queued, room)

    def send(self, node: RouterWithQueue, seen: DecidedRequest) -> None:
        decision = seen.decision
        self.sent.append(seen)
        self.sent_at.append(self.clock())
        first, prediction = decision.choice.first, decision.prediction
        takes = prediction.completion.item(first) - prediction.queue.item(first)
        ticket = node.fleet.dispatch(decision.replica, decision.profile)
        ends = self.clock() + takes * seen.request.slower
        heappush(self.ends, (ends, next(self.numbers), node, decision.replica, ticket))

    @staticmethod
    def observe(node: RouterWithQueue, now: float) -> None:
        """Note since when a request that is alone in its queue could have started."""
        alone = list(node.queue) if len(node.queue) == 1 else []
        decisions = {entry: node.room.decide(entry.profile) for entry in alone}
        node.could_start_since = {
            entry: node.could_start_since.get(entry, now)
            for entry, decision in decisions.items()
            if decision is not None and decision.wait_s <= 0.0
        }


# -- guarantees ------------------------------------------------------------------------------


def check_no_idle_waiting(pool: SharedReplicas) -> None:
    for at, entry in [(node, entry) for node in pool.nodes for entry in node.queue]:
        decision = at.last[entry].decision
        prediction, first = decision.prediction, decision.choice.first
        ends, starts = prediction.completion, prediction.queue <= 0.0
        assert decision.wait_s > 0.0
        gain = ends[first] - ends[starts]
        lost = decision.situation.lost_by_its_rank
        lost = (lost - lost[first])[starts]
        spares = decision.situation.waited < 30.0
        assert not ((gain >= 0.0) & ~(spares & (lost >= 2.0 * gain))).any()
        assert entry.retry_at > pool.clock() - 2 * STEP_S
        could_start_s = pool.clock() - at.could_start_since.get(entry, inf)
        assert could_start_s < SETTLED_S or starts.any()
    for _, refusal, last in pool.refused:
        if isinstance(refusal, Saturated) and last is not None:
            assert (last.prediction.queue > 0.0).all()


def requests(least: int, most: int, **fixed: Any) -> st.SearchStrategy[list[OfferedRequest]]:
    fields: dict[str, st.SearchStrategy[Any]] = {
        "gap_s": st.sampled_from((0.0, 0.0, 0.05, 0.4, 2.0)),
        "prompt": st.sampled_from((500, 5_000, 15_000, 24_000)),
        "answer": st.sampled_from((10, 100, 600)),
        "tenant": st.sampled_from(("", "few", "many")),
        "priority": st.sampled_from((0, 0, 0, 1, -1)),
        "model": st.sampled_from((MODEL, MODEL, OTHER, ADAPTER)),
        "router": st.integers(0, 1),
        "leaves_s": st.sampled_from((inf, inf, inf, 0.0, 1.0, 5.0)),
        "breaks": st.sampled_from((False,) * 9 + (True,)),
        "slower": st.sampled_from((0.3, 1.0, 2.0)),
    }
    return st.lists(st.builds(OfferedRequest, **fields | fixed), min_size=least, max_size=most)


LIMITS = st.fixed_dictionaries(
    {"longest_s": st.sampled_from((4.0, 15.0)), "most": st.sampled_from((3, 10, 1000))}
)
SEED = 1
GAUGES = st.fixed_dictionaries(
    {
        "running": st.sampled_from((0, 1, 200)),
        "waiting": st.sampled_from((0, 50)),
        "kv_usage": st.sampled_from((0.0, 0.5, 1.0)),
        "steps": st.just(5.0),
    }
)
EXAMPLES = settings(
    max_examples=5,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    phases=(Phase.generate,),
)


def examples(test: Callable[..., None]) -> Callable[..., None]:
    """Draw the same examples in every run, even if the test's source changes."""
    return seed(SEED)(EXAMPLES(test))


@examples
@given(requests(10, 30), LIMITS, st.sampled_from(("completion", "least_request", "queue_kv")))
def test_no_request_waits_while_another_replica_would_finish_it_sooner(
    given: list[OfferedRequest], limits: dict[str, Any], policy: str
) -> None:
    pool = SharedReplicas(policy=policy, limits=limits)
    for request in given:
        pool.pass_s(request.gap_s)
        pool.arrive(request)
        check_no_idle_waiting(pool)
    for _ in range(10):
        pool.pass_s(0.5)
        check_no_idle_waiting(pool)


def test_several_routers_expect_the_wait_that_one_router_expects() -> None:
    alone, *several = (mean_expected_wait_s(routers) for routers in (1, 2, 4))
    assert several == pytest.approx([alone] * 2, rel=0.2)


def mean_expected_wait_s(routers: int) -> float:
    pool = SharedReplicas(((MODEL,),) * 2, routers, limits={"longest_s": 60.0})
    pool.play(OfferedRequest(0.3, router=number) for number in range(60))
    return fmean(seen.decision.wait_s for seen in pool.arrived)


def test_place_that_comes_free_goes_to_the_router_with_more_queued() -> None:
    pool = SharedReplicas(((MODEL,),), limits={"longest_s": 120.0})
    for at, number in ((0, 3), (1, 5), (0, 1)):
        for _ in range(number):
            pool.arrive(OfferedRequest(router=at))
        pool.pass_s(0.1)
    assert [len(node.queue) for node in pool.nodes] == [3, 5]
    while any(queued := [len(node.queue) for node in pool.nodes]):
        sent = len(pool.sent)
        while len(pool.sent) == sent:
            pool.pass_s(STEP_S)
        [at] = [seen.request.router for seen in pool.sent[sent:]]
        assert 1.5 * queued[at] >= queued[1 - at]


@pytest.mark.parametrize("later_s", [1.05, 1.1, 1.15])
def test_place_left_to_another_router_keeps_no_higher_priority_waiting(later_s: float) -> None:
    """The request of higher priority waits for one replica when a place on the other comes free."""
    pool = SharedReplicas(((MODEL,),) * 2, limits={"longest_s": 120.0})
    large = OfferedRequest(prompt=38_000)
    pool.arrive(replace(large, slower=3.0))
    pool.pass_s(0.05)
    pool.arrive(replace(large, answer=300, slower=0.6))
    pool.pass_s(0.1)
    for _ in range(6):
        pool.arrive(replace(large, router=1))
    pool.pass_s(later_s)
    first = pool.arrive(replace(large, priority=1))
    assert first is not None
    sent = len(pool.sent)
    while len(pool.sent) == sent:
        pool.pass_s(STEP_S)
    assert pool.sent[sent].request.priority == 1


@examples
@given(requests(10, 30))
def test_no_request_blocks_other_models(given: list[OfferedRequest]) -> None:
    """An arrival is kept from a replica with room only if a queued request goes before it."""
    pool = SharedReplicas().play(given, 0.0)
    for seen in pool.arrived:
        assert seen.room is not None
        me, view = seen.request, seen.decision.situation.view
        denied = (seen.decision.prediction.queue > 0.0) & (seen.room.prediction.queue <= 0.0)
        for row in view.rows[denied].tolist():
            assert any(
                entry.priority > me.priority and at == row
                if entry.priority != me.priority
                else row in entry.usable
                if entry.model == me.model
                else at == row and entry.due + OVERTAKEN_S < seen.since
                for entry, at in seen.queued
            )


@examples
@given(
    requests(
        *(20, 35),
        gap_s=st.sampled_from((0.05, 0.4, 1.0)),
        priority=st.just(0),
        tenant=st.just(""),
        model=st.just(MODEL),
        router=st.just(0),
    )
)
def test_overtaking_is_bounded(given: list[OfferedRequest]) -> None:
    for seen in SharedReplicas().play(given).sent:
        me = seen.request
        for entry, row in seen.queued:
            if (entry.model, *entry.key) == (me.model, me.priority, me.tenant):
                assert row != seen.row or seen.since <= entry.since + OVERTAKEN_S


@examples
@given(requests(15, 30))
def test_no_request_waits_for_a_lower_priority(given: list[OfferedRequest]) -> None:
    pool = SharedReplicas().play(given)
    for seen in pool.sent:
        mine = seen.request.priority
        assert not any(entry.priority > mine and row == seen.row for entry, row in seen.queued)
    for seen in pool.arrived:
        if all(entry.priority < seen.request.priority for entry, _ in seen.queued):
            assert seen.room is not None
            beside, alone = seen.decision.prediction, seen.room.prediction
            assert (beside.queue == alone.queue).all()
            assert (beside.avoidable == alone.avoidable).all()


@examples
@given(requests(15, 30, gap_s=st.just(0.0), prompt=st.just(24_000)))
def test_victim_of_a_full_queue_is_the_newest_of_the_lowest_priority(
    given: list[OfferedRequest],
) -> None:
    pool = SharedReplicas(limits={"most": 4}, routers=1)
    for request in given:
        refused = len(pool.refused)
        [node] = pool.nodes
        present = [*(node.last[entry].request for entry in node.queue), request]
        pool.arrive(request)
        if len(pool.refused) > refused:
            lowest_priority = min(other.priority for other in present)
            lowest = [other for other in present if other.priority == lowest_priority]
            count = Counter(request.tenant for request in lowest)
            victim, refusal, _ = pool.refused[-1]
            assert victim.breaks or isinstance(refusal, Saturated)
            assert count[victim.tenant] == max(count.values())
            assert [request for request in lowest if request.tenant == victim.tenant][-1] is victim


Prompts = list[tuple[int, int]]  # of the two tenants, in turn


def compete(prompts: Prompts, answer: int, model_of_many: str, seconds: int) -> SharedReplicas:
    """Offer 1 and 10 requests per second of two tenants, more than the two replicas can serve."""
    pool = SharedReplicas(models=((MODEL, OTHER),) * 2, routers=1)
    for second in range(seconds + 10):
        for number in range(11 if second < seconds else 1):
            few, many = prompts[(second + number) % len(prompts)]
            offered = (many, answer, "many") if number else (few, answer, "few")
            pool.arrive(OfferedRequest(0.0, *offered, model=model_of_many if number else MODEL))
        pool.pass_s(1.0)
    return pool


def received(pool: SharedReplicas) -> list[dict[str, float]]:
    """Return the replica-seconds of each tenant after each dispatch while both waited."""
    got = [{"few": 0.0, "many": 0.0}]
    for seen in pool.sent:
        if {entry.tenant for entry, _ in seen.queued} == {"few", "many"}:
            tenant = seen.request.tenant
            got.append(got[-1] | {tenant: got[-1][tenant] + seen.decision.work_s})
    return got


def jain(got: dict[str, float]) -> float:
    return sum(got.values()) ** 2 / (len(got) * sum(value**2 for value in got.values()))


@pytest.mark.slow
@examples
@given(
    st.lists(
        st.tuples(*[st.sampled_from((8_000, 12_000, 16_000, 24_000))] * 2), min_size=3, max_size=9
    ),
    st.sampled_from((100, 400)),
)
def test_tenants_with_offered_loads_of_10_to_1_get_the_same(prompts: Prompts, answer: int) -> None:
    pool = compete(prompts, answer, MODEL, seconds=60)
    got = received(pool)
    lead = max(abs(each["few"] - each["many"]) for each in got)
    largest = max(seen.decision.work_s for seen in pool.sent)
    assert jain(got[-1]) >= 0.98
    assert lead <= len(pool.models) * LEAD_S + largest


@pytest.mark.slow
def test_tenants_of_different_models_get_the_same() -> None:
    prompts = [(12_000, 8_000), (16_000, 16_000), (8_000, 24_000), (24_000, 16_000)]
    assert jain(received(compete(prompts, 100, OTHER, seconds=30))[-1]) >= 0.98


@examples
@given(
    requests(15, 30, gap_s=st.sampled_from((0.0, 0.05, 0.4)), breaks=st.just(False)),
    st.sets(st.integers(3, 15), min_size=5, max_size=8),
)
def test_clients_that_leave_do_not_affect_others(
    given: list[OfferedRequest], leaving: set[int]
) -> None:
    """A client that leaves at once changes as much as a request that ends on the same replica."""
    given = [
        replace(request, leaves_s=0.0 if number in leaving else inf)
        for number, request in enumerate(given)
    ]
    pool, without = SharedReplicas().play(given), SharedReplicas()
    waited_for = {id(request): where for request, where in pool.left}
    for request in given:
        without.pass_s(request.gap_s)
        if id(request) in waited_for:
            without.node(request).queue.request_ended(waited_for[id(request)])
        else:
            without.arrive(request)
    without.pass_s(8.0)
    assert times(pool) == times(without)


def times(pool: SharedReplicas) -> dict[int, tuple[float, str]]:
    sent = zip(pool.sent, pool.sent_at, strict=True)
    return {id(seen.request): (at, seen.decision.replica) for seen, at in sent}


@examples
@given(requests(10, 30, slower=st.sampled_from((1.0, 100.0))), LIMITS)
def test_every_wait_ends(given: list[OfferedRequest], limits: dict[str, Any]) -> None:
    pool = SharedReplicas(limits=limits).play(given, 0.0)
    pool.pass_s(15.0)
    assert not any(len(node.queue) for node in pool.nodes)
    outcomes = [seen.request for seen in pool.sent] + [request for request, _, _ in pool.refused]
    arrived = [seen.request for seen in pool.arrived]
    outcomes += [request for request, _ in pool.left]
    assert Counter(map(id, outcomes)) == Counter(map(id, arrived))
    for request, refusal, _ in pool.refused:
        if isinstance(refusal, Saturated):
            assert refusal.code in ("waited_too_long", "too_many_waiting")
            assert refusal.retry_after
        else:
            assert request.breaks


@pytest.mark.slow
@examples
@given(
    GAUGES,
    requests(
        *(15, 25),
        leaves_s=st.just(inf),
        breaks=st.just(False),
        gap_s=st.just(0.0),
        slower=st.just(1000.0),
    ),
)
def test_stuck_gauges_delay_no_queue_for_10_s(
    gauges: dict[str, Any], given: list[OfferedRequest]
) -> None:
    """Every queue gets shorter in any 10 s, though no request ends and no gauge moves."""
    pool = SharedReplicas(frozen=gauges).play(given, 0.0)
    while any(queued := [len(node.queue) for node in pool.nodes]) and pool.clock() < 150.0:
        pool.pass_s(10.0)
        for node, before in zip(pool.nodes, queued, strict=True):
            assert len(node.queue) < before or not before


# -- cost -----------------------------------------------------------------------------------


def queued_pool(
    queued: int, tenants: int, models: int, decisions: Iterator[int]
) -> tuple[SharedReplicas, str]:
    """Return a pool with queued requests, each decision on which takes the next of ``decisions``,
    and the last of their models."""
    names = [MODEL, *map(str, range(1, models))]
    pool = SharedReplicas(models=(tuple(names),) * 2, routers=1, limits={"most": 20_000})
    node = pool.nodes[0]
    while (entry := pool.arrive(OfferedRequest(model=names[-1]))) is None:
        pass
    seen = node.last[entry]
    for number in range(queued):
        profile = replace(entry.profile, tenant=str(number % tenants), model=names[number % models])

        def decide(place: Place, profile: RequestProfile = profile) -> Decision | None:
            next(decisions)
            return node.router.decide(profile, place=place)

        waits = Waiting(profile, seen.decision, pool.clock() + number * 1e-6, decide, entry.resolve)
        node.queue.enter(waits)
        node.last[waits] = seen
    return pool, names[-1]


def spent(queued: int, tenants: int, models: int) -> tuple[int, int]:
    """Return the decisions and bytecodes of an arrival and an end, with requests queued."""
    decisions, opcodes = count(), count()
    pool, model = queued_pool(queued, tenants, models, decisions)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            next(opcodes)
        return trace if "extproc/route" in frame.f_code.co_filename else None

    sys.settrace(trace)
    try:
        pool.arrive(OfferedRequest(model=model, tenant="0"))
        pool.end()
    finally:
        sys.settrace(None)
    return next(decisions), next(opcodes)


@pytest.mark.slow
@pytest.mark.parametrize(("tenants", "models"), [(1, 1), (10_000, 1), (1, 8)])
def test_cost_of_arrival_and_end_does_not_depend_on_queue_length(tenants: int, models: int) -> None:
    few, few_opcodes = spent(16, tenants, models)
    many, many_opcodes = spent(10_000, tenants, models)
    assert many <= max(few, 32)
    assert many_opcodes <= 2 * few_opcodes


def test_end_of_a_request_looks_for_the_candidates_of_few_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests for thousands of LoRA adapters may be queued, and all wait for the same replica."""
    pool, _ = queued_pool(1_500, 1, 1_500, count())
    node = pool.nodes[0]
    eligibility = node.fleet.eligibility
    monkeypatch.setattr(eligibility, "candidates", looks := Mock(wraps=eligibility.candidates))
    node.queue.request_ended(replica(1))
    assert looks.call_count <= 2 * 32


# -- each check fails on a fault ------------------------------------------------------------


def _blocking(self: Backlog, row: int, place: Place) -> bool:
    return row in self._replicas


def _everyone(self: Backlog, row: int, models: int, most: int) -> list[Waiting]:
    groups = [group for line in self._models.values() for group in line._groups.values()]
    return [entry for group in groups for _, entry in group._order]


def _oldest(self: Backlog) -> Waiting:
    return next(iter(self._tenants[min(self._tenants)]))


SOONER = test_no_request_waits_while_another_replica_would_finish_it_sooner
SEVERAL = test_several_routers_expect_the_wait_that_one_router_expects
TURNS = test_place_that_comes_free_goes_to_the_router_with_more_queued
VICTIM = test_victim_of_a_full_queue_is_the_newest_of_the_lowest_priority
COST = partial(test_cost_of_arrival_and_end_does_not_depend_on_queue_length, 1, 1)
FAULTS: list[tuple[Callable[..., object], object, str, object]] = [
    (SOONER, router, "_without_idle_wait", lambda choice, *_: choice),
    (SEVERAL, Peers, "queued", lambda *_: 0.0),
    (TURNS, Turns, "leave", lambda *_: None),
    (test_no_request_blocks_other_models, Backlog, "reserves", _blocking),
    (test_overtaking_is_bounded, Backlog, "reserves", lambda *_: False),
    (test_no_request_waits_for_a_lower_priority, Backlog, "reserves", lambda *_: False),
    (VICTIM, Backlog, "victim", _oldest),
    (test_tenants_with_offered_loads_of_10_to_1_get_the_same, Shares, "charge", lambda *_: None),
    (test_clients_that_leave_do_not_affect_others, Queue, "abandon", lambda *_: None),
    (COST, Backlog, "heads", _everyone),
    (test_every_wait_ends, Queue, "_refuse_overdue", lambda *_: None),
    (test_stuck_gauges_delay_no_queue_for_10_s, queue, "_STUCK_S", inf),
]


@pytest.mark.slow
@pytest.mark.parametrize(("guarantee", "where", "name", "fault"), FAULTS)
def test_fault_breaks_its_guarantee(
    guarantee: Callable[[], None],
    where: object,
    name: str,
    fault: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(AssertionError):
        guarantee()
