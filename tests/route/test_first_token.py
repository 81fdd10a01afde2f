"""The delay of first tokens outside the engine's steps is learned from observed first tokens."""

from dataclasses import replace
from random import Random

import pytest

from extproc.request.profile import RequestProfile
from extproc.route.router import Router
from tests.fakes import A10, ManualClock, chat, decided, fleet_of, replica

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
    assert router.fleet.first_tokens.outside_steps == (0.0, 0.0, 0.0)
