import pytest

from extproc.fleet.fleet import Fleet
from extproc.predict.completion import Prediction, predict
from extproc.request.profile import RequestProfile
from tests.fakes import MODEL, ManualClock, chat, embedding, fleet_of, replica

A10 = "llama-8b-a10"
C0, PREFILL, BATCH, KV = 0.029, 260e-6, 50e-6, 0.26e-6


def predicted(fleet: Fleet, profile: RequestProfile, output: int) -> Prediction:
    view = fleet.view(MODEL)
    held = fleet.held(profile.prefix, view)
    return predict(profile, output, view, fleet.sequences(view), held.cached)


def test_a_lone_request_takes_its_prefill_and_its_decode_steps() -> None:
    fleet = fleet_of(ManualClock(), A10)
    prediction = predicted(fleet, chat(1000, 50), 50)
    steps = sum(C0 + BATCH + KV * (1000 + g) for g in range(1, 50))
    assert prediction.ttft[0] == pytest.approx(C0 + 1000 * PREFILL)
    assert prediction.completion[0] == pytest.approx(C0 + 1000 * PREFILL + steps, rel=0.01)


def test_a_long_prompt_takes_several_steps() -> None:
    fleet = fleet_of(ManualClock(), A10)
    prediction = predicted(fleet, chat(5000, 1), 1)
    assert prediction.completion[0] == pytest.approx(5000 * PREFILL + 3 * C0)


def test_the_queue_ahead_is_prefilled_first() -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    fleet.dispatch(replica(1), chat(4000, 100))
    prediction = predicted(fleet, chat(100, 10), 10)
    assert prediction.ttft[0] - prediction.ttft[1] > 4000 * PREFILL


def test_the_step_in_progress_is_waited_for() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.dispatch(replica(1), chat(100, 1000))
    clock.advance(1.0)
    prediction = predicted(fleet, chat(100, 10), 10)
    assert prediction.step_rest[0] == pytest.approx(C0 / 2, rel=0.05)
    assert prediction.step_rest[1] == 0


def test_a_sequence_about_to_end_costs_less_than_a_long_one() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.dispatch(replica(1), chat(100, 40))
    fleet.dispatch(replica(2), chat(100, 4000))
    clock.advance(1.0)
    prediction = predicted(fleet, chat(10, 200), 200)
    assert prediction.decode[0] < prediction.decode[1]
    assert prediction.cost_to_others[0] < prediction.cost_to_others[1]


def test_a_full_kv_cache_makes_a_prompt_wait_for_the_next_to_end() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.dispatch(replica(1), chat(41_000, 500))
    clock.advance(20.0)
    prediction = predicted(fleet, chat(2000, 50), 50)
    assert prediction.admission[0] > 0.5
    assert prediction.admission[1] == 0
    assert prediction.kv_pressure[0] == 1.0
    assert prediction.kv_pressure[1] < 0.1


def test_on_each_full_replica_it_waits_for_as_many_as_it_needs_to_end() -> None:
    """The one that is sent first ends first; on the third replica there is room."""
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10, A10)
    for prompt, bound in ((20_000, 100), (20_000, 600)):
        for number in (1, 2):
            fleet.dispatch(replica(number), chat(prompt, bound))
    clock.advance(12.0)
    small, large = (predicted(fleet, chat(prompt, 50), 50) for prompt in (3000, 30_000))
    assert 0 < small.admission[0] < large.admission[0]
    assert small.admission[:2].tolist() == pytest.approx([small.admission[0]] * 2)
    assert large.admission[:2].tolist() == pytest.approx([large.admission[0]] * 2)
    assert small.admission[2] == large.admission[2] == 0


def test_an_embedding_only_prefills() -> None:
    fleet = fleet_of(ManualClock(), A10)
    prediction = predicted(fleet, embedding(500), 0)
    assert prediction.completion[0] == pytest.approx(C0 + 500 * PREFILL)


def test_an_empty_prompt_still_takes_a_step() -> None:
    fleet = fleet_of(ManualClock(), A10)
    assert predicted(fleet, chat(0, 1), 1).completion[0] == pytest.approx(C0)


def test_several_sequences_decode_side_by_side() -> None:
    fleet = fleet_of(ManualClock(), A10)
    one = predicted(fleet, chat(100, 100), 100).completion[0]
    four = predicted(fleet, chat(100, 100, sequences=4), 100).completion[0]
    assert one < four < 1.1 * one
