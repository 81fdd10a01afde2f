import random
from collections import Counter
from dataclasses import replace

import pytest

from extproc.fleet.fleet import Fleet
from extproc.request.profile import RequestProfile
from extproc.route.policies import POLICIES
from extproc.route.router import Decision, Router
from tests.fakes import MODEL, ManualClock, chat, fleet_of, replica, state

A10, H100 = "llama-8b-a10", "llama-8b-h100"


def decide(fleet: Fleet, policy: str, profile: RequestProfile, seed: int = 1) -> Decision:
    decision = Router(fleet, policy, random.Random(seed)).decide(profile)
    assert decision is not None
    return decision


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_chooses_a_replica_and_another_for_a_retry(policy: str) -> None:
    decision = decide(fleet_of(ManualClock(), A10, A10, A10), policy, chat(100, 50))
    assert decision.second is not None
    assert decision.replica != decision.second
    assert decision.choice.why


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_works_on_a_single_replica(policy: str) -> None:
    decision = decide(fleet_of(ManualClock(), A10), policy, chat(100, 50))
    assert decision.replica == replica(1)
    assert decision.second is None


@pytest.mark.parametrize("policy", POLICIES)
def test_idle_replicas_alike_share_the_work(policy: str) -> None:
    fleet = fleet_of(ManualClock(), A10, A10, A10, A10)
    router = Router(fleet, policy, random.Random(5))
    chosen: Counter[str] = Counter()
    for _ in range(200):
        decision = router.decide(chat(100, 50))
        assert decision is not None
        chosen[decision.replica] += 1
    assert len(chosen) == 4
    assert min(chosen.values()) > 25


@pytest.mark.parametrize("policy", set(POLICIES) - {"random", "round_robin", "power_of_two"})
def test_a_loaded_replica_is_avoided(policy: str) -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(4):
        fleet.dispatch(replica(1), chat(4000, 800))
    clock.advance(1.5)
    assert decide(fleet, policy, chat(100, 50)).replica == replica(2)


def test_round_robin_takes_turns() -> None:
    router = Router(fleet_of(ManualClock(), A10, A10), "round_robin", random.Random(0))
    decisions = [router.decide(chat(1)) for _ in range(4)]
    assert [d.replica for d in decisions if d] == [replica(1), replica(2)] * 2


def test_round_robin_takes_turns_for_each_of_several_models() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10, A10, A10)
    for number in (3, 4):
        fleet.put(state(number, A10, clock, models=("other",)))
    router = Router(fleet, "round_robin", random.Random(0))
    chosen: Counter[str] = Counter()
    for turn in range(100):
        profile = chat(1) if turn % 2 else replace(chat(1), model="other")
        decision = router.decide(profile)
        assert decision is not None
        chosen[decision.replica] += 1
    assert set(chosen.values()) == {25}


def test_power_of_two_takes_the_less_loaded_of_two() -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    fleet.dispatch(replica(1), chat(10, 10))
    for seed in range(10):
        assert decide(fleet, "power_of_two", chat(1), seed).replica == replica(2)


def test_a_request_may_ask_for_another_policy() -> None:
    router = Router(fleet_of(ManualClock(), A10), "completion", random.Random(0))
    asked, unknown = router.decide(chat(1), "least_kv"), router.decide(chat(1), "no such")
    assert asked is not None
    assert unknown is not None
    assert (asked.policy, unknown.policy) == ("least_kv", "completion")


def test_an_unknown_policy_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'least_request'"):
        Router(fleet_of(ManualClock()), "least_requests", random.Random(0))


def test_without_a_healthy_replica_there_is_no_decision() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.put(state(1, A10, clock, healthy=False))
    assert Router(fleet, "completion", random.Random(0)).decide(chat(1)) is None


class TestCompletion:
    """The cases the default policy exists for."""

    def test_two_short_ones_about_to_finish_beat_one_long_one(self) -> None:
        clock = ManualClock()
        fleet = fleet_of(clock, A10, A10)
        fleet.dispatch(replica(2), chat(20_000, 4000))
        clock.advance(6.0)
        for _ in range(2):
            fleet.dispatch(replica(1), chat(100, 60))
        clock.advance(1.6)
        decision = decide(fleet, "completion", chat(100, 100))
        assert fleet.view(MODEL).requests.tolist() == [2, 1]
        assert decision.replica == replica(1)
        assert "r2 in" in decision.choice.why
        assert decide(fleet, "least_request", chat(100, 100)).replica == replica(2)

    def test_one_nearly_done_beats_two_long_ones(self) -> None:
        clock = ManualClock()
        fleet = fleet_of(clock, A10, A10)
        for _ in range(2):
            fleet.dispatch(replica(1), chat(8000, 4000))
        clock.advance(5.0)
        fleet.dispatch(replica(2), chat(100, 60))
        clock.advance(1.5)
        assert decide(fleet, "completion", chat(100, 100)).replica == replica(2)

    def test_a_busy_fast_replica_beats_an_idle_slow_one(self) -> None:
        clock = ManualClock()
        fleet = fleet_of(clock, H100, A10)
        for _ in range(8):
            fleet.dispatch(replica(1), chat(500, 300))
        clock.advance(0.5)
        decision = decide(fleet, "completion", chat(1000, 200))
        assert decision.replica == replica(1)
        assert decide(fleet, "least_request", chat(1000, 200)).replica == replica(2)

    def test_a_long_queue_beats_a_full_kv_cache_that_frees_late(self) -> None:
        clock = ManualClock()
        fleet = fleet_of(clock, A10, A10)
        fleet.dispatch(replica(1), chat(41_500, 4000))
        clock.advance(15.0)
        for _ in range(4):
            fleet.dispatch(replica(2), chat(1000, 100))
        decision = decide(fleet, "completion", chat(1000, 100))
        assert fleet.view(MODEL).waiting.tolist() == [0, 4]
        assert decision.replica == replica(2)
        assert decision.prediction.admission[0] > decision.prediction.ttft[1]

    def test_it_prefers_the_empty_one_of_two_that_finish_alike(self) -> None:
        fleet = fleet_of(ManualClock(), A10, A10)
        fleet.dispatch(replica(1), chat(3000, 500))
        assert decide(fleet, "completion", chat(100, 10)).replica == replica(2)
