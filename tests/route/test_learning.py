"""Lengths and speeds are learned from the end of requests, and delays from first tokens."""

import random
from dataclasses import replace

import pytest
from msgspec import structs

from extproc.fleet.fleet import Fleet
from extproc.request.profile import RequestProfile
from extproc.route.router import Router
from tests.fakes import A10, MODEL, ManualClock, chat, decided, fleet_of, replica, state

TICK_S = 0.2
STEPS = 4.0  # a tick, of a replica that is slower than its profile says
LATE_S = 0.03


class CountingRouter:
    """A busy replica, and its router that reads no answer."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fleet: Fleet = fleet_of(self.clock, A10)
        self.router = Router(self.fleet, "completion", random.Random(1))
        self.fleet.dispatch(replica(1), chat(100, 100_000))
        self._steps = 0.0

    def serve(self, profile: RequestProfile, ticks: int, ttft: float | None = None) -> None:
        """Send a request whose stream closes after ``ticks`` polls; ``ttft``: forecast to use."""
        decision = decided(self.router, profile)
        ticket = self.fleet.dispatch(decision.replica, profile)
        for _ in range(ticks):
            self.clock.advance(TICK_S)
            self._steps += STEPS
            polled = state(1, A10, self.clock, running=2, steps=self._steps, kv_usage=0.01)
            self.fleet.put(polled)
        ended = self.fleet.release(ticket, prefilled=False)
        forecast = decision.forecast()
        if ttft is not None:
            forecast = structs.replace(forecast, predicted_ttft=ttft)
        self.router.learn_counted(forecast, replica(1), ended, None)

    def expected(self, profile: RequestProfile) -> float:
        return self.fleet.lengths.expected(self.fleet.lengths.row(profile), 60_000.0)

    @property
    def stretch(self) -> float:
        """Actual ÷ predicted decode time."""
        self.clock.advance(1.0)
        return self.fleet.view(MODEL).stretch.item()


@pytest.mark.parametrize("tokens", [20, 800])
def test_answer_length_is_learned_from_counted_steps(tokens: int) -> None:
    system = CountingRouter()
    before = system.expected(chat(100))
    for _ in range(20):
        system.serve(chat(100), round(tokens / STEPS))
    assert abs(system.expected(chat(100)) - tokens) < abs(before - tokens) / 4


def test_answer_cut_by_its_bound_is_recognised_despite_a_short_count() -> None:
    system, cut = CountingRouter(), chat(100, 63)
    system.serve(chat(100), 100)
    before = system.expected(chat(100))
    for _ in range(20):
        system.serve(cut, round(62 / STEPS))
    assert system.expected(chat(100)) > 0.9 * before


def test_slow_decoding_is_learned_from_counted_steps() -> None:
    system = CountingRouter()
    assert system.stretch == 1.0
    for _ in range(10):
        system.serve(chat(100), 50)
    predicted = system.fleet.view(MODEL).decode_step.item()
    assert predicted < 0.7 * TICK_S / STEPS
    assert system.stretch == pytest.approx(TICK_S / STEPS / predicted, rel=0.15)


def test_late_first_token_does_not_count_as_slow_decoding() -> None:
    soon, late = CountingRouter(), CountingRouter()
    for _ in range(10):
        soon.serve(chat(100), 20)
        late.serve(chat(20_000), 30 + 20, ttft=0.0)
    assert late.stretch == pytest.approx(soon.stretch, rel=0.2)


def test_several_sequences_teach_no_length() -> None:
    system = CountingRouter()
    before = system.expected(chat(100, sequences=4))
    system.serve(chat(100, sequences=4), 100)
    assert system.expected(chat(100, sequences=4)) == before


def test_client_that_hangs_up_before_the_first_token_teaches_nothing() -> None:
    system = CountingRouter()
    before = system.expected(chat(100))
    system.serve(chat(100), 0)
    assert system.expected(chat(100)) == before
    assert system.stretch == 1.0


# -- first tokens ------------------------------------------------------------------------------


@pytest.fixture
def router() -> Router:
    return Router(fleet_of(ManualClock(), A10, A10), "completion", random.Random(0))


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
    answer(Router(fleet, "round_robin", random.Random(0)), request_, 2, 3.0)
    assert fleet.view(MODEL).c_prefill[0] == before[0]
