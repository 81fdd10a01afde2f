"""What waits at the router, and what may go."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from typing import Any

import pytest

from extproc.config import HoldSettings
from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.predict.step import PROFILES
from extproc.request.endpoint import Endpoint
from extproc.request.errors import Saturated
from extproc.request.objective import Objective
from extproc.request.profile import RequestProfile
from extproc.route import room
from extproc.route.decision import Decision
from extproc.route.order import Shares
from extproc.route.queue import Queue
from extproc.route.router import Router
from extproc.route.waiting import Place, Waiting
from tests.fakes import MODEL, ManualClock, chat, fleet_of, replica, state

A10 = "llama-8b-a10"
MOST = 24_000  # prompt tokens, of 42,000 that fit: two such requests do not fit beside each other


class System:
    """A router and its queue, in front of replicas of one kind."""

    def __init__(self, replicas: int = 1, **settings: object) -> None:
        self.clock = ManualClock()
        self.fleet: Fleet = fleet_of(self.clock, *[A10] * replicas)
        self.poll()
        self.queue = Queue(self.fleet, HoldSettings.model_validate(settings), self.clock)
        self.router = Router(self.fleet, "completion", random.Random(1), backlog=self.queue.backlog)
        self.gone: list[str] = []
        self.refused: dict[str, Exception] = {}
        self.on: dict[str, tuple[str, Ticket]] = {}

    def come(
        self,
        name: str,
        prompt: int = MOST,
        tenant: str = "",
        priority: int = 0,
        ttft_s: float = inf,
        completion_s: float = inf,
        objective: str = "",
        model: str = MODEL,
        holder: int = 0,
        answer: int | None = 100,
    ) -> Waiting | None:
        """A request comes; what waits, where it has to."""
        profile = RequestProfile(Endpoint.CHAT, model, prompt, prompt, answer, tenant=tenant)
        profile.least_output = answer or 0
        profile.objective = Objective(objective, priority, ttft_s=ttft_s, completion_s=completion_s)
        if holder:
            profile.previous_response = f"resp-{holder}"
            self.fleet.responses.record(profile.previous_response, replica(holder))
        decision = self.router.decide(profile)
        assert decision is not None
        if self.queue.admit(decision):
            self._send(name, decision)
            return None

        def go(outcome: Decision | Exception | None) -> None:
            if isinstance(outcome, Exception):
                self.refused[name] = outcome
            else:
                assert outcome is not None
                self._send(name, outcome)

        since = self.clock()

        def decide(place: Place) -> Decision | None:
            return self.router.decide(profile, place=place)

        one = Waiting(profile, decision, since, decide, go)
        self.queue.enter(one)
        return one

    def fill(self) -> None:
        """One request comes that leaves no room, and decodes."""
        self.come("first")
        self.pass_s(10.0)

    def end(self, name: str) -> None:
        """It is answered."""
        where, ticket = self.on.pop(name)
        self.fleet.release(ticket)
        self.queue.request_ended(where)

    def pass_s(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.poll()
        self.queue.sweep()

    def poll(self, *only: int, **figures: Any) -> None:
        """Of all replicas, or only some."""
        for number in only or range(1, len(self.fleet.members) + 1):
            running = self.fleet.in_flight_on(replica(number))
            kv = {"kv_tokens": 42_000, "kv_usage": 0.6 * min(running, 1)}
            told = {"measured": True, "running": running} | kv | figures
            self.fleet.put(state(number, A10, self.clock, **told))

    def _send(self, name: str, decision: Decision) -> None:
        ticket = self.fleet.dispatch(decision.replica, decision.profile)
        self.gone.append(name)
        self.on[name] = decision.replica, ticket


def test_request_waits_until_its_replica_has_room() -> None:
    system = System()
    system.fill()
    system.come("second")
    assert system.gone == ["first"]
    assert len(system.queue) == 1
    system.pass_s(1.0)
    assert system.gone == ["first"]
    system.end("first")
    assert system.gone == ["first", "second"]
    assert len(system.queue) == 0


def test_no_request_waits_while_replicas_have_room() -> None:
    system = System()
    for name in "abcdef":
        system.come(name, prompt=50)
    assert system.gone == [*"abcdef"]


@pytest.mark.parametrize(("answers", "fit"), [((600,) * 5, 15), ((60, 60, 60, 60, 2760), 17)])
def test_simultaneous_requests_start_up_to_the_peak_of_kv_pressure(
    answers: tuple[int], fit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of one length grow together; where most end soon, there is room for more."""
    monkeypatch.setattr(room, "_PREFILLS_S", inf)
    system = System()
    for tokens in answers * 40:
        system.fleet.lengths.observe(chat(2200), tokens)
    for number in range(30):
        system.come(f"{number}", prompt=2200, answer=None)
    assert len(system.gone) == fit


def test_request_larger_than_the_kv_cache_starts_on_an_idle_replica() -> None:
    system = System()
    system.come("huge", prompt=60_000)
    assert system.gone == ["huge"]


def test_no_request_waits_for_a_stale_replica() -> None:
    system = System()
    system.come("first")
    system.clock.advance(10.0)
    system.come("second")
    assert system.gone == ["first", "second"]


@pytest.mark.parametrize("figures", [{"measured": False}, {"kv_tokens": 0}])
def test_no_request_waits_for_a_replica_of_unknown_capacity(figures: dict[str, float]) -> None:
    system = System()
    system.come("first")
    system.poll(**figures)
    system.come("second")
    assert system.gone == ["first", "second"]


def test_small_request_passes_a_large_request_only_within_the_bound() -> None:
    system = System()
    system.fill()
    system.come("large")
    system.come("small", prompt=500)
    assert system.gone == ["first", "small"]
    system.pass_s(30.0)
    system.come("late", prompt=500)
    assert system.gone == ["first", "small"]
    system.end("first")
    system.pass_s(10.0)
    assert system.gone == ["first", "small", "large", "late"]


def test_queued_request_moves_to_another_replica_with_room() -> None:
    system = System(replicas=2)
    system.come("a")
    system.come("b")
    waiting = system.come("c")
    assert waiting is not None
    other = {replica(1), replica(2)} - {waiting.replica}
    (elsewhere,) = [name for name, (where, _) in system.on.items() if where in other]
    system.end(elsewhere)
    system.pass_s(0.5)
    assert system.gone == ["a", "b", "c"]
    assert system.on["c"][0] in other


def test_queue_is_ordered_by_priority_then_due_time_then_arrival() -> None:
    system = System()
    system.come("first")
    system.come("a")
    system.come("b")
    system.come("due", ttft_s=1.0)
    system.come("urgent", priority=1)
    system.come("batch", priority=-1)
    for _ in range(6):
        system.end(system.gone[-1])
    assert system.gone == ["first", "urgent", "due", "a", "b", "batch"]


def test_no_request_passes_a_higher_priority() -> None:
    system = System()
    system.come("first")
    system.come("urgent", priority=1)
    system.come("small", prompt=500)
    assert system.gone == ["first"]
    system.end("first")
    assert system.gone == ["first", "urgent"]
    system.pass_s(10.0)
    assert system.gone == ["first", "urgent", "small"]


def test_tenants_take_turns_by_what_their_requests_cost() -> None:
    system = System()
    system.come("first")
    for number in range(6):
        system.come(f"many-{number}", tenant="many")
    system.come("few-0", tenant="few")
    system.come("few-1", tenant="few")
    for _ in range(5):
        system.end(system.gone[-1])
    assert {*system.gone[1:5]} == {"many-0", "many-1", "few-0", "few-1"}


def test_request_that_waited_too_long_is_refused_before_envoys_timeout() -> None:
    system = System(longest_s=60)
    system.come("first")
    system.come("second")
    system.pass_s(58.0)
    assert not system.refused
    system.pass_s(1.0)  # a second before Envoy's time is up
    refusal = system.refused["second"]
    assert isinstance(refusal, Saturated)
    assert refusal.code == "waited_too_long"
    assert len(system.queue) == 0


def test_refusal_frees_the_place_that_the_request_reserved() -> None:
    """The refusal of the first request frees the place that it reserved."""
    system = System(longest_s=60)
    system.fill()
    system.come("large", priority=1)
    system.come("small", prompt=500)
    assert system.gone == ["first"]
    system.clock.advance(59.5)
    system.poll(steps=1.0)
    system.queue.sweep()
    assert [*system.refused] == ["large"]
    assert system.gone == ["first", "small"]


def test_few_of_many_refusals_at_once_are_decided_anew() -> None:
    """A look at thousands must not hold up the requests that arrive."""
    system = System(longest_s=60)
    system.fill()
    decided: list[Place] = []
    for number in range(100):
        one = system.come(str(number))
        assert one is not None

        def waits(
            place: Place, decide: Callable[[Place], Decision | None] = one.decide
        ) -> Decision | None:
            decided.append(place)
            return decide(place)

        one.decide = waits
    system.clock.advance(59.5)
    system.poll(steps=1.0)
    system.queue.sweep()
    assert len(system.refused) == 100
    assert len(decided) < 20


def test_full_queue_refuses_a_request() -> None:
    system = System(most=2)
    system.come("first")
    system.come("a")
    system.come("b")
    system.come("c")
    assert "2 requests wait already" in str(system.refused["c"])
    assert len(system.queue) == 2


@pytest.mark.parametrize(("settings", "names"), [({"most": 1}, "abc"), ({"longest_s": 3}, "ab")])
def test_request_starts_on_a_slow_replica_before_it_is_refused(
    settings: dict[str, int], names: str
) -> None:
    """A slow replica idles, for each queued request expects to end sooner on the fast one."""
    system = System(replicas=2, **settings)
    slow = asdict(PROFILES[A10].step) | {"c0": 0.3}
    system.poll(2, learned=slow)
    for name in names:
        system.come(name)
        assert system.on["a"][0] == replica(1)
    assert "b" not in system.on
    for _ in range(3):
        system.clock.advance(1.0)
        system.poll(1)
        system.poll(2, learned=slow)
        system.queue.sweep()
    assert not system.refused
    assert system.on[names[-1]][0] == replica(2)


def test_longest_s_0_turns_the_queue_off() -> None:
    system = System(longest_s=0)
    system.come("first")
    system.come("second")
    assert system.gone == ["first", "second"]


def test_request_of_a_client_that_hangs_up_leaves_the_queue() -> None:
    system = System()
    system.come("first")
    waiting = system.come("second")
    assert waiting is not None
    system.come("third")
    system.queue.abandon(waiting)
    system.end("first")
    assert system.gone == ["first", "third"]


def test_queue_of_one_model_does_not_delay_another_model() -> None:
    system = System(replicas=2)
    system.poll(2, models=("other",))
    system.come("first")
    for number in range(400):
        system.come(f"waits-{number}")
    system.come("other", model="other")
    assert system.gone == ["first", "other"]
    system.come("next", model="other")
    system.end("other")
    assert system.gone == ["first", "other", "next"]


def test_queue_of_a_full_replica_does_not_reserve_an_idle_replica() -> None:
    """Twenty wait for the replica that holds their responses."""
    system = System(replicas=2)
    system.come("first", holder=1)
    for number in range(20):
        system.come(f"waits-{number}", holder=1)
    system.come("other", holder=2)
    assert system.gone == ["first", "other"]


def test_prompt_that_no_replica_can_hold_does_not_wait() -> None:
    system = System()
    system.come("first")
    system.come("endless", prompt=100_000)
    assert system.gone == ["first", "endless"]


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
    """An engine begins with some of its parts."""
    system = System()
    system.come("first", prompt=100, answer=2000)
    decision = system.router.decide(wide)
    assert decision is not None
    assert system.queue.admit(decision)


def test_arrival_and_end_at_a_full_batch_decide_few_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = System()
    name = iter(map(str, itertools.count()))
    while len(system.queue) < 50:
        system.come(next(name), prompt=10)
    decided: list[RequestProfile] = []
    decide = system.router.decide

    def counted(profile: RequestProfile, **where: Any) -> Decision | None:
        decided.append(profile)
        return decide(profile, **where)

    monkeypatch.setattr(system.router, "decide", counted)
    system.come(next(name), prompt=10)
    assert len(decided) == 1
    system.end(system.gone[0])
    assert len(system.queue) == 50
    assert len(decided) <= 3, "the newcomer, who goes, and who is next"


def test_one_request_beyond_a_full_batch_reveals_a_larger_batch() -> None:
    system = System()
    system.poll(max_num_seqs=4, kv_usage=0.05)
    for name in "abcdefg":
        system.come(name, prompt=50)
    system.clock.advance(1.0)
    system.poll(max_num_seqs=4, kv_usage=0.05, running=4, waiting=1)
    system.queue.sweep()
    assert system.gone == [*"abcde"], "four run, and one waits for the next place"
    system.clock.advance(1.0)
    system.poll(max_num_seqs=5, kv_usage=0.05, running=5)
    system.queue.sweep()
    assert system.gone == [*"abcdef"]


def test_expected_wait_counts_all_queued_requests_ahead_at_a_full_batch() -> None:
    system = System()
    system.poll(max_num_seqs=4, kv_usage=0.05)
    arrivals = [system.come(str(number), prompt=50) for number in range(30)]
    first, *queued = filter(None, arrivals)
    assert len(queued) == 24
    cost = sum(one.cost for one in queued)
    later = queued[-1].retry_at - first.retry_at
    assert later == pytest.approx(cost, rel=0.05)


def test_expected_wait_counts_a_request_that_was_unserved_at_first() -> None:
    system = System()
    system.fill()
    profile = RequestProfile(Endpoint.CHAT, MODEL, MOST, MOST, 100)

    def decide(place: Place) -> Decision | None:
        return system.router.decide(profile, place=place)

    unserved = Waiting(profile, None, system.clock(), decide, lambda _: None)
    system.queue.enter(unserved)
    system.pass_s(0.5)
    assert unserved.row is not None
    behind = system.router.decide(profile)
    system.queue.abandon(unserved)
    first = system.router.decide(profile)
    assert first is not None
    assert behind is not None
    assert behind.wait_s > first.wait_s + 0.1


def test_error_of_a_decision_affects_its_request_alone() -> None:
    system = System()
    system.come("first")
    waiting = system.come("broken")
    assert waiting is not None

    def breaks(place: Place) -> Decision | None:
        raise RuntimeError("broken")

    waiting.decide = breaks
    system.come("next")
    system.end("first")
    assert system.gone == ["first", "next"]
    assert str(system.refused["broken"]) == "broken"


def test_all_queued_requests_start_when_polls_stop() -> None:
    system = System()
    system.come("first")
    for number in range(100):
        system.come(str(number))
    system.clock.advance(10.0)
    for _ in range(10):
        system.queue.sweep()
    assert len(system.queue) == 0


def test_share_of_a_frequent_tenant_is_remembered_among_many() -> None:
    """Their names may be of users, of whom there are many."""
    shares = Shares(0.0)
    for number in range(50_000):
        shares.charge(("m", 0, str(number)), 1.0)
    shares.charge(("m", 0, "often"), 5.0)
    assert shares.tag(("m", 0, "often")) > shares.tag(("m", 0, "new"))


def test_recent_share_counts_from_the_start_of_the_process() -> None:
    """On a machine whose clock has run for a month."""
    shares = Shares(3e6)
    shares.charge(("m", 0, "first"), 30.0)
    assert shares.recent(3e6 + 1.0)["first"] == pytest.approx(30.0, rel=0.1)


def test_room_includes_the_growth_of_long_answers() -> None:
    system = System()
    came = [system.come(str(number), prompt=20, answer=4000) for number in range(40)]
    assert 10 < len(system.gone) < 30  # 42,000 tokens
    assert len(system.queue) == 40 - len(system.gone)
    assert re.fullmatch(
        r"r1 is expected to have room for it in \d+\.\d+ s", next(filter(None, came)).why
    )


def test_due_time_of_a_completion_target_excludes_the_decode_time() -> None:
    system = System()
    system.come("first")
    system.come("token", ttft_s=1.0)
    system.come("short", completion_s=8.0)
    system.come("long", completion_s=8.0, answer=1500)  # decodes for 40 s and more
    for _ in range(4):
        system.end(system.gone[-1])
    assert system.gone == ["first", "long", "token", "short"]


def test_queue_counts_requests_by_objective_and_shares_by_tenant() -> None:
    system = System()
    system.come("first", tenant="many")
    for number in range(6):
        system.come(f"many-{number}", tenant="many", objective="chat")
    system.come("few", tenant="few")
    assert system.queue.sizes() == Counter({("chat", "many"): 6, ("", "few"): 1})
    assert not system.queue.shares()
    for _ in range(4):
        system.end(system.gone[-1])
    assert system.queue.sizes() == Counter({("chat", "many"): 3})
    shares = system.queue.shares()
    assert shares["many"] == pytest.approx(3 * shares["few"])
    system.clock.advance(3600.0)
    assert not system.queue.shares()


def test_queued_request_names_its_replica_and_expected_wait() -> None:
    system = System()
    system.come("first")
    full, behind = system.come("full"), system.come("behind", prompt=500, priority=-1)
    assert full is not None
    assert behind is not None
    expected = re.compile(r"r1 is expected to have room for it in (.*) s")
    soon, later = (expected.fullmatch(one.why) for one in (full, behind))
    assert soon is not None
    assert later is not None
    assert 0.0 < float(soon[1]) < float(later[1])


def test_refused_request_is_not_charged_to_its_tenant() -> None:
    system = System()
    system.come("first")
    refused = system.come("refused", tenant="few")
    assert refused is not None

    def refuses(place: Place) -> Decision | None:
        raise Saturated("late", code="too_late")

    refused.decide = refuses
    system.end("first")
    assert isinstance(system.refused["refused"], Saturated)
    assert not system.queue.shares()
