"""The delay of first tokens beside the engine's steps is learned from observed first tokens."""

from dataclasses import replace
from random import Random

import pytest

from extproc.request.profile import RequestProfile
from extproc.route.decision import Decision
from extproc.route.router import Router
from tests.fakes import ManualClock, chat, fleet_of, replica

A10 = "llama-8b-a10"
LATE_S = 0.03


@pytest.fixture
def router() -> Router:
    return Router(fleet_of(ManualClock(), A10, A10), "completion", Random(0))


def decide(router: Router, profile: RequestProfile) -> Decision:
    decision = router.decide(profile)
    assert decision is not None
    return decision


def answer(router: Router, profile: RequestProfile, times: int, by_steps: float) -> None:
    """Let the chosen replica answer, each time a little later than its steps take."""
    for _ in range(times):
        decision = decide(router, profile)
        ttft = by_steps + LATE_S
        router.learn_first_token(decision.forecast(), decision.replica, ttft)


def test_delay_outside_steps_is_learned_for_all_replicas(router: Router) -> None:
    request = chat(1000, 50)
    before = decide(router, request).prediction.ttft
    answer(router, request, 30, before.item(0))
    after = decide(router, request).prediction.ttft
    assert after == pytest.approx(before + LATE_S, rel=0.02)


def test_learned_delay_does_not_grow_with_repetition(router: Router) -> None:
    request = chat(1000, 50)
    by_steps = decide(router, request).predicted_ttft
    answer(router, request, 300, by_steps)
    assert decide(router, request).predicted_ttft == pytest.approx(by_steps + LATE_S, rel=0.02)


def test_requests_delayed_by_other_causes_teach_no_delay(router: Router) -> None:
    request = chat(1000, 50)
    by_steps = decide(router, request).predicted_ttft
    answer(router, replace(request, image_tokens=500), 30, by_steps)
    for number in (1, 2):
        router.fleet.dispatch(replica(number), chat(20_000, 50))
    answer(router, request, 30, by_steps)
    assert router.fleet.first_tokens.outside_steps == (0.0, 0.0, 0.0)
