"""Lengths and speeds are learned from the end of requests whose answers the router did not read."""

import random

import pytest
from msgspec.structs import replace

from extproc.fleet.fleet import Fleet
from extproc.request.profile import RequestProfile
from extproc.route.router import Router
from tests.fakes import A10, MODEL, ManualClock, chat, decided, fleet_of, replica, state

TICK_S = 0.2
STEPS = 4.0  # a tick, of a replica that is slower than its profile says


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
            forecast = replace(forecast, predicted_ttft=ttft)
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
