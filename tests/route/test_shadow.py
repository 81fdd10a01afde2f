"""A policy that decides without effect."""

import random
from dataclasses import replace

import pytest

from extproc.request.objective import Objective
from extproc.route.policies import POLICIES
from extproc.route.router import Decision, Router
from tests.fakes import ManualClock, chat, fleet_of, replica

A10, H100 = "llama-8b-a10", "llama-8b-h100"


def decisions(policy: str, shadow: str | None, times: int = 40) -> list[Decision]:
    """Of a fleet that fills."""
    fleet = fleet_of(ManualClock(), A10, A10, H100, A10)
    router, found = Router(fleet, policy, random.Random(5), shadow=shadow), []
    for _ in range(times):
        decision = router.decide(chat(400, 200))
        assert decision is not None
        fleet.dispatch(decision.replica, decision.profile)
        found.append(decision)
    return found


@pytest.mark.parametrize("policy", ["completion", "round_robin", "random"])
@pytest.mark.parametrize("shadow", POLICIES)
def test_what_is_chosen_is_the_same_with_it_and_without(policy: str, shadow: str) -> None:
    with_it, without = decisions(policy, shadow), decisions(policy, None)
    assert [one.replica for one in with_it] == [one.replica for one in without]
    assert {one.shadow.policy for one in with_it if one.shadow} == {shadow}
    assert {one.shadow for one in without} == {None}


def test_it_is_asked_about_a_quarter_of_the_requests_and_has_turns_of_its_own() -> None:
    shadows = [one.shadow for one in decisions("completion", "round_robin", times=400)]
    turns = [one.first for one in shadows if one]
    assert 70 < len(turns) < 130
    assert turns == [number % 4 for number in range(len(turns))]


def test_the_times_are_those_predicted_for_both() -> None:
    for one in decisions("completion", "round_robin"):
        if one.shadow is None:
            continue
        later = dict(one.shadow.later(one.prediction, one.choice.first))
        completion = one.prediction.completion
        assert later["completion"] == completion[one.shadow.first] - completion[one.choice.first]
        if one.shadow.first == one.choice.first:
            assert set(later.values()) == {0.0}


def test_who_asks_for_a_policy_gets_it_whatever_the_settings_say() -> None:
    router = Router(fleet_of(ManualClock(), A10), "completion", random.Random(1), shadow="random")
    for _ in range(40):
        decision = router.decide(chat(100, 50), "least_request")
        assert decision is not None
        assert decision.shadow is None


def test_a_target_and_a_session_count_for_it_too() -> None:
    fleet = fleet_of(ManualClock(), A10, H100)
    router = Router(fleet, "completion", random.Random(1), 1000.0, shadow="round_robin")
    fleet.sessions.saw("s", replica(1))
    stays = [router.decide(replace(chat(100, 50), session="s")) for _ in range(40)]
    shadows = {(one.policy, one.shadow) for one in stays if one and one.shadow}
    assert shadows == {("session", ("round_robin", 0))}
    soon = Objective("soon", completion_s=5.0)
    met = [router.decide(replace(chat(100, 200), objective=soon)) for _ in range(40)]
    assert len({one.shadow for one in met if one and one.policy == "target" and one.shadow}) == 1
