"""Predicted times of a request, and its work, against the step-time model and simulated engines."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from extproc.fleet.fleet import Fleet
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import Sequence
from extproc.predict.completion import Prediction, add_queue_wait, predict, work
from extproc.predict.step import HardwareProfile, hardware_profile
from extproc.request.objective import NO_OBJECTIVE, Objective
from extproc.request.profile import RequestProfile
from extproc.route.router import Router
from tests.fakes import MODEL, ManualClock, chat, embedding, fleet_of, replica

A10, H100 = "llama-8b-a10", "llama-8b-h100"
C0, PREFILL, BATCH, KV = 0.029, 260e-6, 50e-6, 0.26e-6


def predicted(fleet: Fleet, profile: RequestProfile, output: int) -> Prediction:
    view = fleet.view(MODEL)
    held = fleet.prefix_hits(profile.prefix, view)
    return predict(profile, output, view, fleet.sequences(view), held.cached)


def test_completion_on_an_idle_replica_is_prefill_and_decode_steps() -> None:
    fleet = fleet_of(ManualClock(), A10)
    prediction = predicted(fleet, chat(1000, 50), 50)
    steps = sum(C0 + BATCH + KV * (1000 + g) for g in range(1, 50))
    assert prediction.ttft[0] == pytest.approx(C0 + 1000 * PREFILL)
    assert prediction.completion[0] == pytest.approx(C0 + 1000 * PREFILL + steps, rel=0.01)


def test_start_takes_the_wait_at_the_router_out_once() -> None:
    """The policy and then the session may both start a request whose wait is optional."""
    fleet = fleet_of(ManualClock(), A10)
    prediction = predicted(fleet, chat(1000, 50), 50)
    ttft, completion = prediction.ttft.item(0), prediction.completion.item(0)
    add_queue_wait(prediction, fleet.view(MODEL), np.array([5.0]), 0.0)
    for _ in range(2):
        prediction.start_now(0)
    assert prediction.ttft.item(0) == pytest.approx(ttft)
    assert prediction.completion.item(0) == pytest.approx(completion)


def test_prompt_longer_than_the_token_budget_takes_several_steps() -> None:
    fleet = fleet_of(ManualClock(), A10)
    prediction = predicted(fleet, chat(5000, 1), 1)
    assert prediction.completion[0] == pytest.approx(5000 * PREFILL + 3 * C0)


def test_time_to_first_token_includes_the_prompts_ahead() -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    fleet.dispatch(replica(1), chat(4000, 100))
    prediction = predicted(fleet, chat(100, 10), 10)
    assert prediction.ttft[0] - prediction.ttft[1] > 4000 * PREFILL


def test_decode_time_and_cost_to_others_are_lower_beside_a_sequence_about_to_end() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.dispatch(replica(1), chat(100, 40))
    fleet.dispatch(replica(2), chat(100, 4000))
    clock.advance(1.0)
    prediction = predicted(fleet, chat(10, 200), 200)
    assert prediction.decode[0] < prediction.decode[1]
    assert prediction.cost_to_others[0] < prediction.cost_to_others[1]


def test_admission_on_a_full_kv_cache_waits_until_a_sequence_ends() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.dispatch(replica(1), chat(41_000, 500))
    clock.advance(20.0)
    prediction = predicted(fleet, chat(2000, 50), 50)
    assert prediction.admission[0] > 0.5
    assert prediction.admission[1] == 0
    assert prediction.kv_pressure[0] == 1.0
    assert prediction.kv_pressure[1] < 0.1


def test_admission_waits_for_as_many_sequences_as_the_prompt_needs() -> None:
    """Two replicas are full, and their shorter sequence ends first; the third one has room."""
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


def test_completion_of_an_embedding_is_its_prefill() -> None:
    fleet = fleet_of(ManualClock(), A10)
    prediction = predicted(fleet, embedding(500), 0)
    assert prediction.completion[0] == pytest.approx(C0 + 500 * PREFILL)


def test_empty_prompt_takes_a_step() -> None:
    fleet = fleet_of(ManualClock(), A10)
    assert predicted(fleet, chat(0, 1), 1).completion[0] == pytest.approx(C0 + PREFILL)


def test_sequences_of_a_request_decode_in_the_same_steps() -> None:
    fleet = fleet_of(ManualClock(), A10)
    single = predicted(fleet, chat(100, 100), 100).completion[0]
    four = predicted(fleet, chat(100, 100, sequences=4), 100).completion[0]
    assert single < four < 1.1 * single


def work_of(name: str, profile: RequestProfile) -> float:
    """Work of the request on an idle replica with this hardware profile."""
    decision = Router(fleet_of(ManualClock(), name), "completion", Random(0)).decide(profile)
    assert decision is not None
    return work(decision.profile, decision.prediction, decision.situation.view, 0)


def of_length(prompt: int, output: int, objective: Objective = NO_OBJECTIVE) -> RequestProfile:
    if not output:
        return embedding(prompt)
    return replace(chat(prompt, output), least_output=output, objective=objective)


def throughput(
    profile: HardwareProfile, prompt: int, output: int, at_once: int
) -> tuple[float, float]:
    """Requests per second of an engine that always has ``at_once`` requests of about this length,
    and the mean time per token after the first."""
    engine, random, ended = Engine(profile), Random(1), list[Sequence]()

    def sequences() -> Iterator[Sequence]:
        for number in range(10**6):
            length = max(round(output * random.uniform(0.5, 1.5)), 1) if output else 0
            yield Sequence(number, prompt, length)

    new, now = sequences(), 0.0
    for _ in range(at_once):
        engine.add(next(new), now)
    while len(ended) < 4 * at_once + 20:
        engine.schedule(now)
        outcome = engine.complete()
        now = outcome.ends_at
        for sequence in outcome.finished:
            ended.append(sequence)
            engine.add(next(new), now)
    last = ended[2 * at_once :]
    times = [(sequence.finished or 0.0) - (sequence.first_token or 0.0) for sequence in last]
    tokens = sum(sequence.generated - 1 for sequence in last)
    seconds = (last[-1].finished or 0.0) - (last[0].finished or 0.0)
    return (len(last) - 1) / seconds, sum(times) / max(tokens, 1)


@pytest.mark.parametrize(
    ("name", "prompt", "output", "at_once"),
    [
        (A10, 500, 200, 100),  # the KV cache is full
        (A10, 4000, 20, 20),  # the engine prefills all the time
        (A10, 50, 50, 400),  # the batch is full
        (A10, 1000, 0, 50),
        (H100, 500, 200, 600),
    ],
)
def test_replica_at_capacity_does_a_second_of_work_in_a_second(
    name: str, prompt: int, output: int, at_once: int
) -> None:
    per_second, _ = throughput(hardware_profile(name), prompt, output, at_once)
    assert per_second * work_of(name, of_length(prompt, output)) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("at_once", [4, 16, 48])
def test_request_with_a_target_is_more_work(at_once: int) -> None:
    """The target is what the replica reaches with this many requests at once."""
    per_second, tpot = throughput(hardware_profile(A10), 500, 200, at_once)
    per_token = of_length(500, 200, Objective(tpot_s=tpot))
    assert per_second * work_of(A10, per_token) == pytest.approx(1.0, abs=0.15)
    prefill = 500 * hardware_profile(A10).step.c_prefill
    in_all = of_length(500, 200, Objective(completion_s=tpot * 199 + prefill))
    assert per_second * work_of(A10, in_all) == pytest.approx(1.0, abs=0.2)
    assert work_of(A10, per_token) > work_of(A10, of_length(500, 200))


def test_request_with_an_unreachable_target_takes_the_whole_replica() -> None:
    alone = work_of(A10, of_length(500, 200, Objective(tpot_s=1e-3)))
    per_second, _ = throughput(hardware_profile(A10), 500, 200, 1)
    assert alone * per_second == pytest.approx(1.0, abs=0.1)
