"""Scheduling of the simulated engine, as in vLLM V1."""

from random import Random
from typing import Any

import pytest

from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.features import Speculation
from extproc.lab.simulator.steps import FinishReason, Sequence, Step, StepOutcome
from extproc.predict.step import HardwareProfile, StepModel

STEP = StepModel(0.01, 1e-4, 1e-3, 1e-6, 1e-8)
PROFILE = HardwareProfile("test", STEP, 1600, 256, 16)


def engine_with(*sequences: Sequence, **options: Any) -> Engine:
    """Return an engine with sequences that arrived at 0."""
    engine = Engine(PROFILE, **options)
    for sequence in sequences:
        engine.add(sequence, 0.0)
    return engine


def run(engine: Engine) -> list[StepOutcome]:
    return engine.advance(float("inf"))


def begin(engine: Engine, now: float) -> Step:
    step = engine.schedule(now)
    assert step is not None
    return step


def admitted(step: Step) -> list[int]:
    return [sequence.id for sequence, _ in step.chunks]


def ended(outcomes: list[StepOutcome]) -> list[int]:
    return [sequence.id for outcome in outcomes for sequence in outcome.finished]


def single_request_time(prompt: int, output: int, budget: int) -> float:
    time, done = 0.0, 0
    while done < prompt:
        chunk = min(budget, prompt - done)
        time += STEP.step_time(chunk, 1, done, chunk * (done + chunk / 2))
        done += chunk
    return time + sum(STEP.step_time(0, 1, prompt + i) for i in range(output - 1))


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (100, 1), (256, 2), (257, 40), (1000, 300)])
def test_single_request_takes_a_step_for_each_chunk_and_token(prompt: int, output: int) -> None:
    engine, sequence = Engine(PROFILE), Sequence(1, prompt, output)
    engine.add(sequence, 5.0)
    run(engine)
    assert sequence.finished == pytest.approx(5.0 + single_request_time(prompt, output, 256))
    assert sequence.generated == output
    assert engine.steps == -(-prompt // 256) + output - 1


def test_cold_steps_take_twice_as_long() -> None:
    cold, warm = (engine_with(Sequence(1, 300, 6), cold_steps=steps) for steps in (3, 0))
    extra = STEP.step_time(256, 1, 0, 256 * 128) + STEP.step_time(44, 1, 256, 44 * 278)
    extra += STEP.step_time(0, 1, 300)
    assert run(cold)[-1].ends_at == pytest.approx(run(warm)[-1].ends_at + extra)
    late = Sequence(2, 100, 5)
    cold.add(late, 10.0)
    run(cold)
    assert late.finished == pytest.approx(10.0 + single_request_time(100, 5, 256))


@pytest.mark.parametrize(("old", "attempts"), [(False, 1), (True, 16)])
def test_old_counters_count_cache_hits_at_each_attempt_to_admit(old: bool, attempts: int) -> None:
    """Count as vLLM did before the fix of its issue 43736."""
    engine = engine_with(Sequence(1, 64, 1, range(4)), kv_tokens=160, old_counters=old)
    run(engine)
    engine.add(Sequence(2, 80, 16), 1.0)  # needs the 6 blocks that are not cached
    begin(engine, 1.0)
    engine.add(waiting := Sequence(3, 160, 1, range(4)), 1.0)  # needs all 10 blocks
    run(engine)
    assert waiting.cached_tokens == 64
    assert engine.counters.prefix_hits == 64 * attempts


def test_cache_hits_are_counted_before_their_prompt() -> None:
    engine = engine_with(Sequence(1, 320, 1, range(20)), kv_tokens=8000)
    run(engine)
    engine.add(Sequence(2, 4000, 1, range(20)), 1.0)
    begin(engine, 1.0)
    engine.complete()  # the first of two steps
    counters = engine.counters
    assert (counters.prefix_hits, counters.cached_tokens, counters.prompt_tokens) == (320, 0, 320)


def test_step_without_a_token_is_not_counted() -> None:
    engine = engine_with(Sequence(1, 1000, 3))
    run(engine)
    assert (engine.steps, engine.counters.steps) == (6, 3)
    assert engine.counters.iteration_tokens.sum == 1003


@pytest.mark.parametrize("freezing", [False, True])
def test_gauges_are_set_at_the_end_of_a_step(freezing: bool) -> None:
    first, second = Sequence(1, 320, 2), Sequence(2, 10, 1)
    engine = engine_with(first, kv_tokens=512, max_num_seqs=1)
    engine.freezing_gauges = freezing
    begin(engine, 0.0)
    engine.add(second, 0.01)
    assert engine.gauges[:3] == (0, 0, 0.0)
    engine.complete()
    assert engine.gauges[:3] == ((0, 0, 0.0) if freezing else (1, 0, 0.5))
    begin(engine, 1.0)
    engine.complete()
    assert engine.gauges[:3] == (1, 1, 0.625)
    engine.abort(first, 1.1)
    engine.abort(second, 1.1)
    assert engine.gauges[:3] == ((1, 1, 0.625) if freezing else (0, 0, 0.0))


def test_prefill_gets_the_token_budget_that_decoding_leaves() -> None:
    engine, long = engine_with(Sequence(1, 10, 50)), Sequence(2, 400, 1)
    begin(engine, 0.0)
    engine.complete()
    engine.add(long, 0.1)
    assert begin(engine, 0.1).chunks == [(long, 255)]
    outcome = engine.complete()
    assert [sequence.id for sequence in outcome.decoded] == [1]
    assert outcome.prefilled == []
    assert engine.counters.prompt_tokens == 10, "counted when the prefill ends"


def test_sequences_are_admitted_in_order_up_to_max_num_seqs() -> None:
    engine = engine_with(*(Sequence(number, 10, 5) for number in range(4)), max_num_seqs=2)
    assert admitted(begin(engine, 0.0)) == [0, 1]
    assert (engine.running, engine.waiting) == (2, 2)


def test_prompt_waits_until_all_its_blocks_are_free() -> None:
    sizes = ((160, 10), (300, 2), (10, 2))
    engine = engine_with(*(Sequence(id_, *size) for id_, size in enumerate(sizes)), kv_tokens=320)
    assert admitted(begin(engine, 0.0)) == [0], "the next sequences wait in order"
    run(engine)
    assert engine.counters.preemptions == 0
    assert engine.counters.finished[FinishReason.STOP] == 3


@pytest.mark.parametrize(("caching", "computed"), [(True, [64, 49]), (False, [64, 81])])
def test_sequence_admitted_last_is_preempted_and_recomputed(
    caching: bool, computed: list[int]
) -> None:
    """The other sequence has taken three of the five full blocks meanwhile."""
    first, second = Sequence(1, 64, 60), Sequence(2, 64, 60)
    engine, now = engine_with(first, second, kv_tokens=160, prefix_caching=caching), 0.0
    chunks = []
    while (step := engine.schedule(now)) is not None:
        chunks += [chunk for sequence, chunk in step.chunks if sequence is second]
        now = step.ends_at
        engine.complete()
    assert chunks == computed
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.generated == 60
    assert engine.counters.prompt_tokens == 128, "counted once"
    assert engine.counters.generated_tokens == 120
    assert engine.kv_usage == 0


def test_step_with_a_preemption_admits_no_sequence() -> None:
    engine, now = engine_with(Sequence(1, 64, 60), Sequence(2, 64, 60), kv_tokens=160), 0.0
    while not engine.counters.preemptions:
        step = begin(engine, now)
        if engine.counters.preemptions:
            assert (step.chunks, engine.waiting) == ([], 1)
        now = step.ends_at
        engine.complete()


def test_priority_admits_the_lowest_value_first_then_the_oldest() -> None:
    engine = Engine(PROFILE, max_num_seqs=1, by_priority=True)
    for number, priority in enumerate([0, 5, -3, 5, -3]):
        engine.add(Sequence(number, 10, 2, priority=priority), 0.0 + number / 1000)
    assert ended(run(engine)) == [2, 4, 0, 1, 3]


def test_priority_preempts_the_last_rank_and_requeues_by_rank() -> None:
    batch, urgent = Sequence(1, 64, 60, priority=9), Sequence(2, 64, 60)
    waiting = Sequence(3, 64, 1, priority=1)
    engine = engine_with(batch, kv_tokens=160, by_priority=True)
    for at, sequence in ((0.02, urgent), (0.1, waiting)):
        engine.advance(at)
        engine.add(sequence, at)
    assert ended(run(engine)) == [3, 2, 1], (
        "later arrivals of a better rank run before the preempted sequence"
    )
    assert (batch.preemptions, urgent.preemptions, waiting.preemptions) == (1, 0, 0)
    assert engine.kv_usage == 0


def test_priority_never_preempts_for_a_waiting_sequence() -> None:
    batch, urgent = Sequence(1, 140, 10, priority=9), Sequence(2, 64, 2)
    engine = engine_with(batch, kv_tokens=160, by_priority=True)
    engine.advance(0.01)
    engine.add(urgent, 0.01)
    run(engine)
    assert engine.counters.preemptions == 0
    assert batch.finished is not None
    assert urgent.first_token is not None
    assert batch.finished < urgent.first_token


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        ((100, 5), (100, 5), 96),  # full blocks of a common prefix
        ((64, 1), (64, 1), 48),  # a token is left to compute
        ((70, 59), (160, 1), 128),  # the answer, in the next turn
    ],
)
@pytest.mark.parametrize("caching", [True, False])
def test_cached_prefix_is_not_recomputed(
    first: tuple[int, int], second: tuple[int, int], cached: int, caching: bool
) -> None:
    hashes = range(sum(second) // 16)
    engine = engine_with(Sequence(1, *first, hashes), prefix_caching=caching)
    run(engine)
    assert engine.kv_usage == 0
    again = Sequence(2, *second, hashes)
    engine.add(again, 10.0)
    computed = min(second[0] - cached * caching, 256)
    assert begin(engine, 10.0).chunks == [(again, computed)]
    run(engine)
    assert again.cached_tokens == cached * caching
    counters = engine.counters
    queries = first[0] + second[0]
    assert (counters.prefix_queries, counters.prefix_hits) == (queries * caching, cached * caching)
    assert engine.kv_usage == 0


def test_accepted_drafts_end_with_the_sequence() -> None:
    sequence = Sequence(1, 10, 11)
    engine = engine_with(sequence, speculation=Speculation(3, 1.0, Random(0)))
    # The steps give 1, 4 and 4 tokens, and 2 of 4 at the end.
    assert [outcome.accepted.get(1, 0) for outcome in run(engine)] == [0, 3, 3, 1]
    counters = engine.counters
    assert sequence.generated == counters.generated_tokens == 11
    assert (counters.steps, counters.drafts, counters.draft_tokens) == (4, 3, 9)
    assert counters.accepted_tokens == 9, "vLLM counts drafts beyond the end"


def test_drafts_take_time_and_token_budget() -> None:
    engine = engine_with(Sequence(1, 10, 3), speculation=Speculation(4, 0.0, Random(0)))
    begin(engine, 0.0)
    engine.complete()
    long = Sequence(2, 400, 1)
    engine.add(long, 0.1)
    step = begin(engine, 0.1)
    assert step.chunks == [(long, 251)]
    attention = 4 * 10 + 251 * 251 / 2
    assert step.ends_at - 0.1 == pytest.approx(STEP.step_time(4 + 251, 2, 10, attention))


def test_mean_tokens_of_a_draft_match_its_acceptance() -> None:
    speculation = Speculation(4, 0.7, Random(0))
    engine = engine_with(Sequence(1, 10, 20_000), kv_tokens=32_000, speculation=speculation)
    run(engine)
    assert engine.steps == pytest.approx(20_000 / speculation.tokens_per_step, rel=0.03)


def test_arrival_waits_for_the_end_of_the_step() -> None:
    engine, sequence = engine_with(Sequence(1, 10, 1000)), Sequence(2, 10, 1)
    engine.advance(1.0)
    assert engine.step is not None
    end = engine.step.ends_at
    assert end > 1.0
    engine.add(sequence, 1.0)
    engine.advance(end)
    assert sequence.admitted == end


def test_impossible_sequence_is_refused() -> None:
    engine = engine_with(Sequence(1, 100, 61), kv_tokens=160)
    with pytest.raises(ValueError, match="grows to 161 tokens"):
        engine.add(Sequence(2, 100, 62), 0.0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_num_seqs": 257}, "token budget 256"),
        ({"kv_tokens": 8}, "KV tokens"),
        ({"speculation": Speculation(16, 0.5, Random(0))}, r"token budget 256 .* 16 drafts"),
    ],
)
def test_contradicting_options_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Engine(PROFILE, **options)
