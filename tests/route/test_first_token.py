"""The delay of first tokens outside the engine's steps is learned from observed first tokens."""

from dataclasses import replace
from random import Random

import pytest

from extproc.request.profile import RequestProfile
from extproc.route.router import Router
from tests.fakes import A10, MODEL, ManualClock, chat, decided, fleet_of, replica, state

LATE_S = 0.03


@pytest.fixture
def router() -> Router:
    return Router(fleet_of(ManualClock(), A10, A10), "completion", Random(0))


def answer(router: Router, profile: RequestProfile, times: int, by_steps: float) -> None:
    """Let the chosen replica answer ``times`` requests, each ``LATE_S`` later than ``by_steps``."""
    for _ in range(times):
        decision = decided(router, profile)
        ttft = by_steps + LATE_S
        router.learn_first_token(decision.forecast(), decision.replica, ttft)


@pytest.mark.parametrize("times", [30, 300])
def test_delay_outside_steps_is_learned_once_for_all_replicas(router: Router, times: int) -> None:
    request = chat(1000, 50)
    before = decided(router, request).prediction.ttft
    answer(router, request, times, before.item(0))
    after = decided(router, request).prediction.ttft
    assert after == pytest.approx(before + LATE_S, rel=0.02)


def test_requests_delayed_by_other_causes_teach_no_delay(router: Router) -> None:
    request = chat(1000, 50)
    by_steps = decided(router, request).predicted_ttft
    answer(router, replace(request, fetches=True), 30, by_steps)
    for number in (1, 2):
        router.fleet.dispatch(replica(number), chat(20_000, 50))
    answer(router, request, 30, by_steps)
    assert router.fleet.speeds.first_tokens.outside_steps == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "request_", [replace(chat(500, 50), fetches=True), chat(2000, 50)], ids=["image", "too long"]
)
def test_first_token_that_no_step_time_explains_teaches_no_speed(request_: RequestProfile) -> None:
    """By its estimated tokens, the long prompt does not fit into the first replica."""
    clock = ManualClock()
    fleet = fleet_of(clock)
    for number, context in ((1, 1000), (2, 65_536)):
        fleet.put(state(number, A10, clock, measured=False, max_model_len=context))
    before = fleet.view(MODEL).c_prefill.tolist()
    answer(Router(fleet, "round_robin", Random(0)), request_, 2, 3.0)
    assert fleet.view(MODEL).c_prefill[0] == before[0]
