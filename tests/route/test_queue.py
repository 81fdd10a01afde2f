"""Requests wait for room, start in order, and are refused as the settings say."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from math import inf
from typing import Any

import numpy as np
import pytest

from extproc.config import HoldSettings
from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.predict.step import PROFILES
from extproc.request.endpoint import Endpoint
from extproc.request.errors import Saturated
from extproc.request.objective import Objective
from extproc.request.prefix import Prefix
from extproc.request.profile import RequestProfile
from extproc.route import room
from extproc.route.decision import Decision
from extproc.route.order import Shares
from extproc.route.queue import Queue
from extproc.route.router import Router
from extproc.route.waiting import Place, Waiting
from tests.fakes import A10, MODEL, ManualClock, chat, decided, fleet_of, replica, state
from tests.fleet.test_digests import deliver

LARGE = 24_000  # prompt tokens: of 42,000 that a replica holds, two such requests do not fit


class QueuedRouter:
    """A router and its queue, in front of replicas of equal speed."""

    def __init__(self, replicas: int = 1, session_cost_s: float = 0.0, **settings: object) -> None:
        self.clock = ManualClock()
        self.fleet: Fleet = fleet_of(self.clock, *[A10] * replicas)
        self.poll()
        self.queue = Queue(self.fleet, HoldSettings.model_validate(settings))
        self.router = Router(
            self.fleet, "completion", random.Random(1), session_cost_s, self.queue.backlog
        )
        self.dispatched: list[str] = []
        self.refused: dict[str, Exception] = {}
        self.running: dict[str, tuple[str, Ticket]] = {}

    def send(
        self,
        name: str,
        prompt: int = LARGE,
        tenant: str = "",
        priority: int = 0,
        ttft_s: float = inf,
        completion_s: float = inf,
        objective: str = "",
        model: str = MODEL,
        owner: int = 0,
        answer: int | None = 100,
        session: str = "",
    ) -> Waiting | None:
        """Send a request; return its place in the queue, or None if the request starts."""
        profile = RequestProfile(Endpoint.CHAT, model, prompt, prompt, answer, tenant=tenant)
        profile.least_output, profile.session = answer or 0, session
        profile.objective = Objective(objective, priority, ttft_s=ttft_s, completion_s=completion_s)
        if owner:
            profile.previous_response = f"resp-{owner}"
            self.fleet.responses.record(profile.previous_response, replica(owner))
        decision = decided(self.router, profile)
        if self.queue.admit(decision):
            self._dispatch(name, decision)
            return None

        def resolve(outcome: Decision | Exception | None) -> None:
            if isinstance(outcome, Exception):
                self.refused[name] = outcome
            else:
                assert outcome is not None
                self._dispatch(name, outcome)

        since = self.clock()

        def decide(place: Place) -> Decision | None:
            return self.router.decide(profile, place=place)

        entry = Waiting(profile, decision, since, decide, resolve)
        self.queue.enter(entry)
        return entry

    def fill(self) -> None:
        """Start a request that leaves no room, and let it decode."""
        self.send("first")
        self.pass_s(10.0)

    def end(self, name: str) -> None:
        where, ticket = self.running.pop(name)
        self.fleet.release(ticket)
        self.queue.request_ended(where)

    def pass_s(self, seconds: float, **figures: Any) -> None:
        self.clock.advance(seconds)
        self.poll(**figures)
        self.queue.sweep()

    def poll(self, *only: int, **figures: Any) -> None:
        for number in only or range(1, len(self.fleet.members) + 1):
            running = self.fleet.in_flight_on(replica(number))
            kv = {"kv_tokens": 42_000, "kv_usage": 0.6 * min(running, 1)}
            figures_now = {"measured": True, "running": running} | kv | figures
            self.fleet.put(state(number, A10, self.clock, **figures_now))

    def _dispatch(self, name: str, decision: Decision) -> None:
        ticket = self.fleet.dispatch(decision.replica, decision.profile)
        self.dispatched.append(name)
        self.running[name] = decision.replica, ticket


BOUND = pytest.mark.parametrize("bound", [{"owner": 1}, {"session": "s"}])
"""Arguments of :meth:`QueuedRouter.send` for a request that waits for the first replica alone."""


def with_session() -> QueuedRouter:
    """Return a router whose session ``s`` stays on the first of two replicas."""
    system = QueuedRouter(replicas=2, session_cost_s=1000.0)
    system.fleet.sessions.record("s", replica(1))
    return system


@pytest.mark.parametrize(("answers", "fit"), [((600,) * 5, 15), ((60, 60, 60, 60, 2760), 17)])
def test_simultaneous_requests_start_up_to_the_peak_of_kv_pressure(
    answers: tuple[int], fit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of equal length grow together; if most end soon, more requests fit."""
    monkeypatch.setattr(room, "_PREFILLS_S", inf)
    system = QueuedRouter()
    for tokens in answers * 40:
        system.fleet.lengths.observe(chat(2200), tokens)
    for number in range(30):
        system.send(f"{number}", prompt=2200, answer=None)
    assert len(system.dispatched) == fit


def test_request_larger_than_the_kv_cache_starts_on_an_idle_replica() -> None:
    system = QueuedRouter()
    system.send("huge", prompt=60_000)
    assert system.dispatched == ["huge"]


WITHOUT_WAIT: dict[str, tuple[float, dict[str, Any], int, float]] = {
    "for a stale replica": (10.0, {}, LARGE, 300.0),
    "for a replica that is not measured": (0.0, {"measured": False}, LARGE, 300.0),
    "for a replica of unknown KV cache size": (0.0, {"kv_tokens": 0}, LARGE, 300.0),
    "with a prompt that no replica can hold": (0.0, {}, 100_000, 300.0),
    "with longest_s 0": (0.0, {}, LARGE, 0.0),
}


@pytest.mark.parametrize(
    ("after_s", "figures", "prompt", "longest_s"), WITHOUT_WAIT.values(), ids=WITHOUT_WAIT
)
def test_request_does_not_wait(
    after_s: float, figures: dict[str, Any], prompt: int, longest_s: float
) -> None:
    system = QueuedRouter(longest_s=longest_s)
    system.send("first")
    system.clock.advance(after_s)
    if figures:
        system.poll(**figures)
    system.send("second", prompt=prompt)
    assert system.dispatched == ["first", "second"]


def test_small_request_passes_a_large_request_only_within_the_bound() -> None:
    system = QueuedRouter()
    system.fill()
    system.send("large")
    system.send("small", prompt=500)
    assert system.dispatched == ["first", "small"]
    system.pass_s(30.0)
    system.send("late", prompt=500)
    assert system.dispatched == ["first", "small"]
    system.end("first")
    system.pass_s(10.0)
    assert system.dispatched == ["first", "small", "large", "late"]


def test_queue_is_ordered_by_priority_then_due_time_then_arrival() -> None:
    system = QueuedRouter()
    system.send("first")
    system.send("a")
    system.send("b")
    system.send("due", ttft_s=1.0)
    system.send("urgent", priority=1)
    system.send("batch", priority=-1)
    for _ in range(6):
        system.end(system.dispatched[-1])
    assert system.dispatched == ["first", "urgent", "due", "a", "b", "batch"]


def test_request_that_waited_too_long_is_refused_before_envoys_timeout() -> None:
    system = QueuedRouter(longest_s=60)
    system.send("first")
    system.send("second")
    system.pass_s(58.0)
    assert not system.refused
    system.pass_s(1.0)  # a second before Envoy's time is up
    refusal = system.refused["second"]
    assert isinstance(refusal, Saturated)
    assert refusal.code == "waited_too_long"
    assert len(system.queue) == 0


def test_refusal_frees_the_place_that_the_request_reserved() -> None:
    system = QueuedRouter(longest_s=60)
    system.fill()
    system.send("large", priority=1)
    system.send("small", prompt=500)
    assert system.dispatched == ["first"]
    system.pass_s(59.5, steps=1.0)
    assert [*system.refused] == ["large"]
    assert system.dispatched == ["first", "small"]


def test_few_of_many_refusals_at_once_are_decided_anew() -> None:
    """A sweep of thousands must not delay the requests that arrive."""
    system = QueuedRouter(longest_s=60)
    system.fill()
    decided: list[Place] = []
    for number in range(100):
        entry = system.send(str(number))
        assert entry is not None

        def waits(
            place: Place, decide: Callable[[Place], Decision | None] = entry.decide
        ) -> Decision | None:
            decided.append(place)
            return decide(place)

        entry.decide = waits
    system.pass_s(59.5, steps=1.0)
    assert len(system.refused) == 100
    assert len(decided) < 20


def test_full_queue_refuses_a_request() -> None:
    system = QueuedRouter(most=2)
    system.send("first")
    system.send("a")
    system.send("b")
    system.send("c")
    assert "2 requests wait already" in str(system.refused["c"])
    assert len(system.queue) == 2


@pytest.mark.parametrize(("settings", "names"), [({"most": 1}, "abc"), ({"longest_s": 3}, "ab")])
def test_request_starts_on_a_slow_replica_before_it_is_refused(
    settings: dict[str, int], names: str
) -> None:
    """The slow replica idles: each queued request expects to end sooner on the fast replica."""
    system = QueuedRouter(replicas=2, **settings)
    slow = asdict(PROFILES[A10].step) | {"c0": 0.3}
    system.poll(2, learned=slow)
    for name in names:
        system.send(name)
        assert system.running["a"][0] == replica(1)
    assert "b" not in system.running
    for _ in range(3):
        system.clock.advance(1.0)
        system.poll(1)
        system.poll(2, learned=slow)
        system.queue.sweep()
    assert not system.refused
    assert system.running[names[-1]][0] == replica(2)


def test_session_waits_for_its_replica_until_it_would_be_refused() -> None:
    system = QueuedRouter(replicas=2, session_cost_s=1000.0, longest_s=3)
    system.send("first")
    home, _ = system.running["first"]
    system.fleet.sessions.record("s", home)
    waiting = system.send("second", session="s")
    assert waiting is not None
    assert waiting.replica == home
    system.pass_s(1.0)
    assert system.dispatched == ["first"]
    system.pass_s(1.0)
    assert system.running["second"][0] != home
    assert not system.refused


def with_cached_prompt(system: QueuedRouter, ahead: int, decoding: int) -> RequestProfile:
    """Return a request whose prompt replica 1 has cached, behind a prompt of ``ahead`` tokens.

    On replica 2, ``decoding`` requests would wait for its prefill.
    """
    fleet, keys = system.fleet, np.arange(10, dtype=np.uint64)
    cached = replace(chat(2000, 100), prefix=Prefix(keys, 200.0, 2000.0))
    fleet.first_token(fleet.dispatch(replica(1), cached))
    for _ in range(decoding):
        fleet.first_token(fleet.dispatch(replica(2), chat(100, 300)))
    fleet.dispatch(replica(1), chat(ahead, 100))
    return cached


def test_prompts_ahead_keep_no_request_from_its_cached_prompt() -> None:
    """The other replica would end sooner, and its eight requests would wait for the prefill."""
    system = QueuedRouter(replicas=2)
    cached = with_cached_prompt(system, ahead=4000, decoding=8)
    decision = decided(system.router, cached)
    assert (decision.replica, decision.wait_s) == (replica(1), 0.0)
    there, elsewhere = decision.prediction.completion
    assert there > elsewhere


def test_weight_of_the_first_token_stays_as_scored_if_the_request_starts_at_once() -> None:
    system = QueuedRouter(replicas=2)
    stream = replace(with_cached_prompt(system, ahead=1200, decoding=0), stream=True)
    place = Place(stream, system.clock(), 1.0, 1.0)
    place.last_chance = True
    decision = decided(system.router, stream, place)
    prediction, scores = decision.prediction, decision.choice.scores
    assert (decision.replica, decision.wait_s) == (replica(1), 0.0)
    scored = prediction.completion + prediction.first_token_weight * prediction.ttft
    assert scores[1] == pytest.approx(scored[1] + prediction.lost_by_others[1])


def test_request_that_starts_before_queued_ones_is_not_late_because_of_them() -> None:
    system = QueuedRouter(replicas=2)
    system.poll(models=(MODEL, "other"))
    cached = with_cached_prompt(system, ahead=1200, decoding=20)
    for number in range(10):
        assert system.send(str(number), prompt=500, model="other", owner=1)
    cached.objective = Objective(ttft_s=0.45, sheddable=True)
    decision = decided(system.router, cached)
    assert (decision.replica, decision.wait_s) == (replica(1), 0.0)
    assert decision.predicted_ttft < 0.45
    assert decision.why.startswith("1 of 2 meet its target; r1 finishes it in")
    assert decision.situation.late is not None
    assert decision.situation.late.min() < 0.0


def test_queue_of_a_full_replica_does_not_reserve_an_idle_replica() -> None:
    system = QueuedRouter(replicas=2)
    system.send("first", owner=1)
    for number in range(20):
        system.send(f"waits-{number}", owner=1)
    system.send("other", owner=2)
    assert system.dispatched == ["first", "other"]


@pytest.mark.parametrize(
    ("beside", "priority", "waits"), [(0, 0, False), (1, 0, False), (20, 0, True), (20, 10, False)]
)
def test_request_waits_if_others_would_lose_much_more_than_it_gains(
    beside: int, priority: int, waits: bool
) -> None:
    """The second replica has room for the prompt, whose prefill delays all answers there."""
    system = QueuedRouter(replicas=2)
    system.send("first", owner=1)
    for number in range(beside):
        system.send(f"beside-{number}", prompt=20, answer=400, owner=2)
    system.pass_s(10.0)
    system.poll(2, kv_usage=0.1)
    entry = system.send("next", priority=priority)
    assert (entry is not None) is waits
    if entry:
        entry.since -= 31.0
        assert decided(system.router, entry.profile, entry).replica == replica(2)
        entry.since += 31.0
    for _ in range(6):  # without progress on the first replica
        system.clock.advance(1.0)
        system.poll(1, kv_usage=0.9)
        system.poll(2, kv_usage=0.1)
        system.queue.sweep()
    assert system.running["next"][0] == replica(2)


@pytest.mark.parametrize(
    "wide",
    [
        RequestProfile(Endpoint.COMPLETIONS, MODEL, 100, 100, 5, sequences=5000),
        RequestProfile(
            Endpoint.EMBEDDINGS, MODEL, 50_000, 0, 0, sequences=0, prompts=100, longest_share=0.01
        ),
    ],
    ids=["sequences", "prompts"],
)
def test_request_with_more_parts_than_a_batch_does_not_wait(wide: RequestProfile) -> None:
    """The engine begins with some of the parts."""
    system = QueuedRouter()
    system.send("first", prompt=100, answer=2000)
    assert system.queue.admit(decided(system.router, wide))


def count_decisions(system: QueuedRouter, monkeypatch: pytest.MonkeyPatch) -> list[RequestProfile]:
    """Return a list to which each decision from now on adds its request."""
    decided: list[RequestProfile] = []
    decide = system.router.decide

    def counted(profile: RequestProfile, **where: Any) -> Decision | None:
        decided.append(profile)
        return decide(profile, **where)

    monkeypatch.setattr(system.router, "decide", counted)
    return decided


def test_arrival_and_end_at_a_full_batch_decide_few_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = QueuedRouter()
    name = iter(map(str, itertools.count()))
    while len(system.queue) < 50:
        system.send(next(name), prompt=10)
    decided = count_decisions(system, monkeypatch)
    system.send(next(name), prompt=10)
    assert len(decided) == 1
    system.end(system.dispatched[0])
    assert len(system.queue) == 50
    assert len(decided) <= 3, "the new request, the dispatched request, and the next"


def test_end_decides_few_of_many_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model's first request waits for prompts ahead, although KV space is free."""
    system = QueuedRouter()
    models = [str(number) for number in range(100)]
    system.poll(models=(MODEL, *models))
    system.send("first", prompt=6_000)
    for model in models:
        system.send(model, prompt=300, model=model)
    system.clock.advance(0.3)
    decided = count_decisions(system, monkeypatch)
    system.end("first")
    assert 90 < len(system.queue) < 100
    assert len(decided) <= 32


def test_one_request_beyond_a_full_batch_reveals_a_larger_batch() -> None:
    system = QueuedRouter()
    system.poll(max_num_seqs=4, kv_usage=0.05)
    for name in "abcdefg":
        system.send(name, prompt=50)
    system.pass_s(1.0, max_num_seqs=4, kv_usage=0.05, running=4, waiting=1)
    assert system.dispatched == [*"abcde"], "four run, and one waits for the next place"
    system.pass_s(1.0, max_num_seqs=5, kv_usage=0.05, running=5)
    assert system.dispatched == [*"abcdef"]


def test_expected_wait_counts_all_queued_requests_ahead_at_a_full_batch() -> None:
    system = QueuedRouter()
    system.poll(max_num_seqs=4, kv_usage=0.05)
    arrivals = [system.send(str(number), prompt=50) for number in range(30)]
    first, *queued = filter(None, arrivals)
    assert len(queued) == 24
    cost = sum(entry.cost for entry in queued)
    later = queued[-1].retry_at - first.retry_at
    assert later == pytest.approx(cost, rel=0.05)


def test_queued_requests_of_a_lower_priority_lengthen_no_expected_wait() -> None:
    waits_s: list[float] = []
    for batch_tenants in (0, 10):
        system = QueuedRouter()
        system.fill()
        system.send("few", tenant="few")
        for number in range(9):
            system.send(f"many-{number}", tenant="many")
        for number in range(batch_tenants):
            system.send(f"batch-{number}", tenant=f"batch-{number}", priority=-1)
        entry = system.send("next", tenant="few")
        assert entry is not None
        waits_s.append(entry.retry_at - system.clock())
    assert waits_s[0] == waits_s[1]


def test_expected_wait_counts_a_request_that_was_unserved_at_first() -> None:
    system = QueuedRouter()
    system.fill()
    profile = RequestProfile(Endpoint.CHAT, MODEL, LARGE, LARGE, 100)

    def decide(place: Place) -> Decision | None:
        return system.router.decide(profile, place=place)

    unserved = Waiting(profile, None, system.clock(), decide, lambda _: None)
    system.queue.enter(unserved)
    system.pass_s(0.5)
    assert unserved.row is not None
    behind = decided(system.router, profile)
    system.queue.abandon(unserved)
    first = decided(system.router, profile)
    assert behind.wait_s > first.wait_s + 0.1


def test_queued_requests_share_the_set_of_usable_replicas() -> None:
    """For a thousand replicas and 10,000 requests, the sets would take 0.6 GB."""
    system = QueuedRouter()
    system.fill()
    first, second = system.send("a"), system.send("b")
    assert first is not None
    assert second is not None
    assert first.usable is second.usable


def test_request_whose_replica_left_is_not_unserved_while_others_serve_its_model() -> None:
    system = QueuedRouter(replicas=2)
    for number in (1, 2):
        system.send(f"first-{number}", owner=number)
    for number in range(40):
        system.send(str(number))
    system.fleet.remove(replica(1))
    system.queue.sweep()
    assert not system.queue.unserved_by_model()
    system.fleet.remove(replica(2))
    for _ in range(10):
        system.pass_s(0.1)
    assert system.queue.unserved_by_model() == {MODEL: 40}


def test_all_queued_requests_start_when_polls_stop() -> None:
    system = QueuedRouter()
    system.send("first")
    for number in range(100):
        system.send(str(number))
    system.clock.advance(10.0)
    for _ in range(10):
        system.queue.sweep()
    assert len(system.queue) == 0


def test_requests_stay_queued_while_another_router_is_silent() -> None:
    system = QueuedRouter()
    other = fleet_of(system.clock, A10)
    other.dispatch(replica(1), chat(100))
    deliver(other, system.fleet)
    system.fill()
    system.send("second")
    system.pass_s(0.5)
    assert system.fleet.peers.stale
    assert (system.dispatched, len(system.queue)) == (["first"], 1)


@BOUND
def test_request_that_waits_for_one_replica_keeps_no_tenant_from_others(
    bound: dict[str, Any],
) -> None:
    system = with_session()
    for number in (1, 2):
        system.send(f"first-{number}", owner=number)
    system.send("few", tenant="few", **bound)
    for number in range(3):
        system.send(f"many-{number}", tenant="many", owner=2)
    for ended in ("first-2", "many-0", "many-1"):
        system.end(ended)
        system.pass_s(1.0)
    assert system.dispatched[2:] == ["many-0", "many-1", "many-2"]


@BOUND
def test_request_behind_one_that_waits_for_one_replica_starts_on_another(
    bound: dict[str, Any],
) -> None:
    system = with_session()
    system.send("first-1", owner=1)
    system.send("first-2", owner=2, answer=3_000)
    first = system.send("bound", **bound)
    other = system.send("other")
    assert first is not None
    assert other is not None
    assert other.replica == replica(1)
    waits_s = first.retry_at - system.clock()
    system.end("first-2")
    assert system.dispatched[2:] == ["other"]
    system.pass_s(1.0)
    assert first.retry_at - system.clock() < waits_s


@pytest.mark.parametrize("figures", [{"healthy": False}, {"draining": True}, {"asleep": True}])
def test_session_waits_for_no_replica_that_gets_no_requests(figures: dict[str, bool]) -> None:
    """A request of another session, which waits for its own replica, stands before it."""
    system = QueuedRouter(replicas=3, session_cost_s=1000.0)
    for number in (1, 2, 3):
        system.send(f"first-{number}", owner=number, answer=1000)
    for number in (1, 2):
        system.fleet.sessions.record(f"s-{number}", replica(number))
        system.send(f"bound-{number}", session=f"s-{number}")
    system.end("first-3")
    system.pass_s(0.1)
    assert system.dispatched == ["first-1", "first-2", "first-3"]
    for _ in range(20):
        system.clock.advance(0.05)
        system.poll(1, 3)
        system.poll(2, **figures)
        system.queue.sweep()
    assert system.dispatched[3:] == ["bound-2"]
    assert system.running["bound-2"][0] == replica(3)


def test_no_request_waits_for_a_stalled_replica() -> None:
    """A request starts there as a trial, and the next one on another replica."""
    system = with_session()
    system.send("first", session="s")
    for step in range(17):
        system.clock.advance(1.0)
        system.poll(1)
        system.poll(2, steps=step)
    for name in ("trial", "next"):
        system.send(name, session="s")
    assert [where for where, _ in system.running.values()] == [replica(n) for n in (1, 1, 2)]


def test_tenant_pays_only_for_its_own_requests_when_its_last_one_starts() -> None:
    system = QueuedRouter(replicas=2)
    for number in (1, 2):
        system.send(f"first-{number}", owner=number)
    system.send("few-1", 30_000, "few", owner=1)
    for number in range(4):
        system.send(f"many-{number}", tenant="many", owner=2)
    for ended in ("first-2", "many-0", "many-1", "first-1"):
        system.end(ended)
        system.pass_s(1.0)
    assert system.dispatched[2:] == ["many-0", "many-1", "many-2", "few-1"]
    system.send("few-2", tenant="few", owner=2)
    system.end("many-2")
    assert system.dispatched[-1] == "few-2"


def test_share_of_a_frequent_tenant_is_remembered_among_many() -> None:
    """Tenants may be users, of whom there are many: the least served are forgotten."""
    shares = Shares(0.0, queued=())
    for tenant in ("often", *map(str, range(25_000))):
        key = (0, tenant)
        shares.enter(key)
        shares.charge(key, 5.0 if tenant == "often" else 1.0)
    assert shares.tag((0, "often")) > shares.tag((0, "new"))
    assert len(shares._tags) < 20_002


def test_recent_share_counts_from_the_start_of_the_process() -> None:
    """The monotonic clock of the machine may have run for a month."""
    shares = Shares(3e6, queued=())
    shares.charge((0, "first"), 30.0)
    assert shares.recent(3e6 + 1.0)["first"] == pytest.approx(30.0, rel=0.1)


def test_room_includes_the_growth_of_long_answers() -> None:
    system = QueuedRouter()
    arrivals = [system.send(str(number), prompt=20, answer=4000) for number in range(40)]
    assert 10 < len(system.dispatched) < 30  # 42,000 tokens
    assert len(system.queue) == 40 - len(system.dispatched)
    assert re.fullmatch(
        r"r1 is expected to have room for it in \d+\.\d+ s", next(filter(None, arrivals)).why
    )


def test_due_time_of_a_completion_target_excludes_the_decode_time() -> None:
    system = QueuedRouter()
    system.send("first")
    system.send("token", ttft_s=1.0)
    system.send("short", completion_s=8.0)
    system.send("long", completion_s=8.0, answer=1500)  # decodes for 40 s and more
    for _ in range(4):
        system.end(system.dispatched[-1])
    assert system.dispatched == ["first", "long", "token", "short"]


def test_queue_counts_requests_by_objective_and_shares_by_tenant() -> None:
    system = QueuedRouter()
    system.send("first", tenant="many")
    for number in range(6):
        system.send(f"many-{number}", tenant="many", objective="chat")
    system.send("few", tenant="few")
    assert system.queue.sizes() == Counter({("chat", "many"): 6, ("", "few"): 1})
    assert not system.queue.shares()
    for _ in range(4):
        system.end(system.dispatched[-1])
    assert system.queue.sizes() == Counter({("chat", "many"): 3})
    shares = system.queue.shares()
    assert shares["many"] == pytest.approx(3 * shares["few"])
    system.clock.advance(3600.0)
    assert not system.queue.shares()


def test_queued_request_names_its_replica_and_expected_wait() -> None:
    system = QueuedRouter()
    system.send("first")
    full, behind = system.send("full"), system.send("behind", prompt=500, priority=-1)
    assert full is not None
    assert behind is not None
    expected = re.compile(r"r1 is expected to have room for it in (.*) s")
    soon, later = (expected.fullmatch(entry.why) for entry in (full, behind))
    assert soon is not None
    assert later is not None
    assert 0.0 < float(soon[1]) < float(later[1])


def test_refused_request_is_not_charged_to_its_tenant() -> None:
    system = QueuedRouter()
    system.send("first")
    refused = system.send("refused", tenant="few")
    assert refused is not None

    def refuses(place: Place) -> Decision | None:
        raise Saturated("late", code="too_late")

    refused.decide = refuses
    system.end("first")
    assert isinstance(system.refused["refused"], Saturated)
    assert not system.queue.shares()
