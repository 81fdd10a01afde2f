"""A request with a target goes to a replica that meets it, and leaves faster replicas to others."""

import random
from dataclasses import replace
from math import inf

import pytest

from extproc.fleet.fleet import Fleet
from extproc.request.objective import Objective
from extproc.request.profile import RequestProfile
from extproc.route.decision import Decision
from extproc.route.router import Router
from extproc.route.waiting import Place
from tests.fakes import A10, H100, ManualClock, chat, decided, fleet_of, replica, state

SLOW, FAST = replica(1), replica(2)


def of(ttft_s: float = inf, tpot_s: float = inf, completion_s: float = inf) -> RequestProfile:
    """Return a request that generates 100 tokens."""
    aim = Objective("aim", ttft_s=ttft_s, tpot_s=tpot_s, completion_s=completion_s)
    return replace(chat(1_000, 100), least_output=100, objective=aim)


def router_of(fleet: Fleet, policy: str = "completion") -> Router:
    return Router(fleet, policy, random.Random(1))


def slow_and_fast() -> Fleet:
    """Return an idle replica, and a busy replica that is four times as fast."""
    clock = ManualClock()
    fleet = fleet_of(clock, A10, H100)
    for _ in range(30):
        fleet.dispatch(FAST, chat(1_000, 1_000))
    clock.advance(3.0)
    return fleet


def decide(router: Router, profile: RequestProfile, waited: float = 0.0) -> Decision:
    place = Place(profile, router.fleet.now - waited, decode_s=0.0, cost=0.0)
    return decided(router, profile, place)


def test_completion_target_leaves_the_fast_replica_to_others() -> None:
    router = router_of(slow_and_fast())
    without = decide(router, of())
    assert (without.replica, without.choice.policy) == (FAST, "completion")
    slow, fast = without.prediction.completion
    lenient = decide(router, of(completion_s=slow * 1.1))
    assert (lenient.replica, lenient.second, lenient.choice.policy) == (SLOW, FAST, "target")
    assert "2 of 2 meet its target; r1 finishes it in" in lenient.why
    tight = decide(router, of(completion_s=(slow + fast) / 2))
    assert (tight.replica, tight.second) == (FAST, SLOW)
    assert "1 of 2 meet its target; r2 finishes it in" in tight.why


def test_tpot_target_leaves_the_fast_replica_to_others() -> None:
    router = router_of(slow_and_fast())
    slow, fast = decide(router, of()).prediction.decode / 99
    assert decide(router, of(tpot_s=slow * 1.1)).replica == SLOW
    assert decide(router, of(tpot_s=(slow + fast) / 2)).replica == FAST


def test_all_targets_must_be_met() -> None:
    router = router_of(slow_and_fast())
    prediction = decide(router, of()).prediction
    first, _ = prediction.ttft
    assert decide(router, of(completion_s=60.0, ttft_s=first * 1.1)).replica == SLOW
    assert decide(router, of(completion_s=60.0, ttft_s=first * 0.9)).replica == FAST


def test_request_that_misses_its_target_everywhere_follows_the_policy() -> None:
    router = router_of(slow_and_fast())
    decision = decide(router, of(completion_s=0.01))
    assert decision.replica == FAST
    assert decision.why.startswith("no replica meets its target; r2 finishes it in")


def test_ttft_target_overrides_the_policy_only_if_late(clock: ManualClock) -> None:
    fleet = fleet_of(clock, H100, H100)
    for _ in range(20):
        fleet.dispatch(replica(2), chat(8_000, 100))
    router = router_of(fleet, "round_robin")
    aim = of(ttft_s=1.0)
    assert [decide(router, aim).replica for _ in range(3)] == [replica(1)] * 3
    assert [decide(router, of(ttft_s=60.0)).replica for _ in range(2)] == [replica(2), replica(1)]


def test_time_in_the_queue_counts_towards_the_target() -> None:
    router = router_of(slow_and_fast())
    slow, _ = decide(router, of()).prediction.completion
    aim = of(completion_s=slow * 1.1)
    assert decide(router, aim).replica == SLOW
    assert decide(router, aim, waited=slow * 0.2).replica == FAST


def test_prediction_errors_enlarge_the_safety_margin() -> None:
    router = router_of(slow_and_fast())
    before = decide(router, of())
    slow, _ = before.prediction.completion
    aim = of(completion_s=slow * 1.2)
    assert decide(router, aim).replica == SLOW
    foretold = before.forecast().predicted_completion
    for number in range(100):
        late = 1.5 if number % 5 == 0 else 1.0  # every fifth request
        router.error_quantiles.completion.observe(foretold, late * foretold)
    assert decide(router, aim).replica == FAST
    for _ in range(300):
        router.error_quantiles.completion.observe(foretold, foretold)
    assert decide(router, aim).replica == SLOW


def test_replica_that_cannot_hold_the_prompt_meets_no_target(clock: ManualClock) -> None:
    fleet = fleet_of(clock, H100, A10)
    fleet.put(state(1, H100, clock, max_model_len=500))
    missed = of(tpot_s=0.02)  # by the second replica
    for aim in (of(completion_s=60.0), of(ttft_s=60.0), of(tpot_s=60.0), missed):
        assert decide(router_of(fleet), aim).replica == replica(2)


def test_request_that_generates_nothing_meets_its_tpot_target() -> None:
    router = router_of(slow_and_fast())
    profile = replace(of(tpot_s=0.001), sequences=0)
    assert "meet its target" in decide(router, profile).why


@pytest.mark.parametrize("policy", ["least_request", "lmetric", "queue_kv", "random"])
def test_target_overrides_other_policies(policy: str) -> None:
    router = router_of(fleet_of(ManualClock(), A10, H100), policy)
    first = decide(router_of(router.fleet), of()).prediction.ttft[0]
    assert {decide(router, of(ttft_s=first * 0.9)).replica for _ in range(10)} == {FAST}


def test_target_reaches_a_replica_that_power_of_two_did_not_draw() -> None:
    router = router_of(fleet_of(ManualClock(), *[A10] * 9, H100), "power_of_two")
    first = decide(router_of(router.fleet), of()).prediction.ttft[0]
    assert {decide(router, of(ttft_s=first * 0.9)).replica for _ in range(30)} == {replica(10)}


def test_session_precedes_the_target() -> None:
    fleet = fleet_of(ManualClock(), A10, H100)
    fleet.sessions.record("s", FAST)
    decision = decide(router_of(fleet), replace(of(completion_s=60.0), session="s"))
    assert (decision.replica, decision.choice.policy) == (FAST, "session")
