"""A session stays with its replica while the delay is at most ``route.session_cost_s``."""

import random
from dataclasses import replace

import pytest

from extproc.fleet.fleet import Fleet
from extproc.fleet.members import ModelNames
from extproc.request.objective import session_key, session_of
from extproc.route.decision import Decision
from extproc.route.router import Router
from tests.fakes import A10, H100, ManualClock, chat, decided, fleet_of, replica, state

PROFILE = replace(chat(1_000, 50), session="s")


def decide(fleet: Fleet, cost_s: float = 1.0, policy: str = "completion") -> Decision:
    return decided(Router(fleet, policy, random.Random(1), cost_s), PROFILE)


def later(decision: Decision) -> float:
    """Return the seconds by which the chosen replica finishes later than the best."""
    return decision.predicted_completion - float(decision.prediction.completion.min())


@pytest.mark.parametrize("policy", ["completion", "least_request", "round_robin"])
def test_session_stays_with_its_replica_under_every_policy(policy: str) -> None:
    fleet = fleet_of(ManualClock(), A10, A10, A10)
    fleet.sessions.record("s", replica(2))
    for _ in range(6):
        decision = decide(fleet, policy=policy)
        assert decision.replica == replica(2)
        assert decision.choice.policy == "session"
        assert decision.second in (replica(1), replica(3))
        assert "the session is there" in decision.why
        fleet.dispatch(replica(2), chat(10, 10))


def test_session_moves_if_staying_costs_more_than_session_cost_s() -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    fleet.sessions.record("s", replica(2))
    while decide(fleet, 0.5).replica == replica(2):
        assert later(decide(fleet, 0.5)) <= 0.5
        fleet.dispatch(replica(2), chat(1_000, 100))
    decision = decide(fleet, 0.5)
    assert (decision.replica, decision.second) == (replica(1), replica(2))
    assert "the session was on r2" in decision.why
    assert "later than on the best replica" in decision.why
    assert "finishes it in" in decision.why
    stays = decide(fleet, 60.0)
    assert (stays.replica, later(stays) > 0.5) == (replica(2), True)


def test_moved_session_stays_with_its_new_replica() -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    fleet.sessions.record("s", replica(2))
    for _ in range(20):
        fleet.dispatch(replica(2), chat(1_000, 100))
    fleet.sessions.record("s", decide(fleet, 0.1).replica)
    decision = decide(fleet, 0.1)
    assert (decision.replica, "is there" in decision.why) == (replica(1), True)


@pytest.mark.parametrize("figures", [{"draining": True}, {"healthy": False}])
def test_session_leaves_a_replica_that_is_dead_or_drains(figures: dict[str, bool]) -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, H100)
    fleet.sessions.record("s", replica(2))
    fleet.put(state(2, H100, clock, **figures))
    decision = decide(fleet, 1_000.0)
    assert decision.replica == replica(1)
    assert "cannot serve the request now" in decision.why
    fleet.remove(replica(2))
    assert decide(fleet, 1_000.0).replica == replica(1)


def test_prompt_too_long_for_the_session_goes_elsewhere(clock: ManualClock) -> None:
    fleet = fleet_of(clock, A10, A10)
    fleet.put(state(2, A10, clock, max_model_len=500))
    fleet.sessions.record("s", replica(2))
    assert decide(fleet, 1_000.0).replica == replica(1)


def test_stored_response_precedes_the_session() -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    fleet.sessions.record("s", replica(2))
    fleet.responses.remember("resp_1", replica(1))
    router = Router(fleet, "completion", random.Random(1), 1.0)
    decision = decided(router, replace(PROFILE, previous_response="resp_1"))
    assert (decision.replica, decision.choice.policy) == (replica(1), "owner")


def test_session_keeps_the_model_that_was_drawn() -> None:
    fleet = fleet_of(ManualClock(), A10)
    fleet.put(state(2, A10, ManualClock(), models=("next",)))
    fleet.members.names = ModelNames({"canary": {"llama": 1.0, "next": 1.0}})
    routers = [Router(fleet, "completion", random.Random(seed)) for seed in range(5)]
    for session in map(str, range(20)):
        assert len({router.model("canary", "", None, session) for router in routers}) == 1
    assert len({routers[0].model("canary", "", None, str(number)) for number in range(20)}) == 2


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, ""),
        ({"x-session": "abc"}, "abc"),
        ({"cookie": "a=b; sid=x=y;c=d"}, "x=y"),
        ({"cookie": "sid=x", "x-session": "abc"}, "abc"),
        ({"cookie": "xsid=1; sid"}, ""),
        ({"cookie": ";;=;"}, ""),
    ],
)
def test_session_id_is_read_from_header_or_cookie(headers: dict[str, str], session: str) -> None:
    assert session_of(headers, "X-Session", "sid") == session
    assert session_of(headers, None, None) == ""


def test_session_key_differs_by_model_and_has_a_fixed_length() -> None:
    assert session_key("s", "a") != session_key("s", "b")
    assert len(session_key("s" * 10_000, "m")) == 32
