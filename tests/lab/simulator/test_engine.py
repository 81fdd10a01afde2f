from random import Random

import pytest

from extproc.lab.simulator.blocks import trace_hashes
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.features import Speculation
from extproc.lab.simulator.steps import FinishReason, Outcome, Sequence
from extproc.predict.step import HardwareProfile, StepModel

STEP = StepModel(0.01, 1e-4, 1e-3, 1e-6, 1e-8)
PROFILE = HardwareProfile("test", STEP, 1600, 256, 16)


def run(engine: Engine) -> list[Outcome]:
    return engine.advance(float("inf"))


def lone_request_time(prompt: int, output: int, budget: int) -> float:
    time, done = 0.0, 0
    while done < prompt:
        chunk = min(budget, prompt - done)
        time += STEP.step_time(chunk, 1, done, chunk * (done + chunk / 2))
        done += chunk
    return time + sum(STEP.step_time(0, 1, prompt + i) for i in range(output - 1))


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (100, 1), (256, 2), (257, 40), (1000, 300)])
def test_a_lone_request_takes_its_chunks_and_one_step_a_token(prompt: int, output: int) -> None:
    engine = Engine(PROFILE)
    sequence = Sequence(1, prompt, output)
    engine.add(sequence, 5.0)
    run(engine)
    assert sequence.finished == pytest.approx(5.0 + lone_request_time(prompt, output, 256))
    assert sequence.generated == output
    assert engine.steps == -(-prompt // 256) + output - 1


def test_a_pooling_request_ends_with_its_prefill() -> None:
    engine = Engine(PROFILE)
    sequence = Sequence(1, 300, 0)
    engine.add(sequence, 0.0)
    outcomes = run(engine)
    assert outcomes[-1].finished == [sequence]
    assert (engine.steps, engine.counters.generated_tokens) == (2, 0)
    assert engine.counters.prompt_tokens == 300
    assert engine.counters.first_tokens == 1


def test_a_step_counts_only_if_a_sequence_gets_something_of_it() -> None:
    engine = Engine(PROFILE)
    engine.add(Sequence(1, 1000, 3), 0.0)
    run(engine)
    assert (engine.steps, engine.counters.steps) == (6, 3)
    assert engine.counters.iteration_tokens.sum == 1003


def test_gauges_show_the_end_of_the_last_step() -> None:
    engine = Engine(PROFILE, kv_tokens=512, max_num_seqs=1)
    first, second = Sequence(1, 320, 2), Sequence(2, 10, 1)
    engine.add(first, 0.0)
    engine.schedule(0.0)
    engine.add(second, 0.01)
    assert engine.gauges[:3] == (0, 0, 0.0)
    engine.complete()
    assert engine.gauges[:3] == (1, 0, 0.5)
    engine.schedule(1.0)
    engine.complete()
    assert engine.gauges[:3] == (1, 1, 0.625)
    engine.abort(first, 1.1)
    engine.abort(second, 1.1)
    assert engine.gauges[:3] == (0, 0, 0.0)


def test_decoding_goes_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    engine = Engine(PROFILE)
    engine.add(Sequence(1, 10, 50), 0.0)
    engine.schedule(0.0)
    engine.complete()
    long = Sequence(2, 400, 1)
    engine.add(long, 0.1)
    step = engine.schedule(0.1)
    assert step is not None
    assert step.chunks == [(long, 255)]
    outcome = engine.complete()
    assert [sequence.id for sequence in outcome.decoded] == [1]
    assert outcome.prefilled == []
    assert engine.counters.prompt_tokens == 10, "counted when the prefill ends"


def test_waiting_ones_are_admitted_in_order_up_to_max_num_seqs() -> None:
    engine = Engine(PROFILE, max_num_seqs=2)
    for number in range(4):
        engine.add(Sequence(number, 10, 5), 0.0)
    step = engine.schedule(0.0)
    assert step is not None
    assert [sequence.id for sequence, _ in step.chunks] == [0, 1]
    assert (engine.running, engine.waiting) == (2, 2)


def test_a_prompt_is_admitted_only_when_all_of_it_fits() -> None:
    engine = Engine(PROFILE, kv_tokens=320)
    engine.add(Sequence(1, 160, 10), 0.0)
    engine.add(Sequence(2, 300, 2), 0.0)
    engine.add(Sequence(3, 10, 2), 0.0)
    step = engine.schedule(0.0)
    assert step is not None
    assert [sequence.id for sequence, _ in step.chunks] == [1], "the next ones wait in order"
    run(engine)
    assert engine.counters.preemptions == 0
    assert engine.counters.finished[FinishReason.STOP] == 3


def test_without_blocks_the_last_admitted_is_preempted_and_computed_again() -> None:
    engine = Engine(PROFILE, kv_tokens=160)
    first, second = Sequence(1, 64, 60), Sequence(2, 64, 60)
    engine.add(first, 0.0)
    engine.add(second, 0.0)
    run(engine)
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.generated == 60
    assert engine.counters.prompt_tokens == 128, "counted once"
    assert engine.counters.generated_tokens == 120
    assert engine.kv_usage == 0


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    engine = Engine(PROFILE, kv_tokens=160)
    engine.add(Sequence(1, 64, 60), 0.0)
    engine.add(Sequence(2, 64, 60), 0.0)
    now = 0.0
    while not engine.counters.preemptions:
        step = engine.schedule(now)
        assert step is not None
        if engine.counters.preemptions:
            assert step.chunks == []
            assert engine.waiting == 1
        now = step.ends_at
        engine.complete()


def test_by_priority_the_lower_is_admitted_first_and_of_equals_who_came_first() -> None:
    engine = Engine(PROFILE, max_num_seqs=1, by_priority=True)
    for number, priority in enumerate([0, 5, -3, 5, -3]):
        engine.add(Sequence(number, 10, 2, priority=priority), 0.0 + number / 1000)
    ended = [sequence.id for outcome in run(engine) for sequence in outcome.finished]
    assert ended == [2, 4, 0, 1, 3]


def test_by_priority_the_last_in_order_is_preempted_and_goes_back_to_its_place() -> None:
    engine = Engine(PROFILE, kv_tokens=160, by_priority=True)
    batch, urgent = Sequence(1, 64, 60, priority=9), Sequence(2, 64, 60)
    waiting = Sequence(3, 64, 1, priority=1)
    engine.add(batch, 0.0)
    engine.advance(0.02)
    engine.add(urgent, 0.02)
    engine.advance(0.1)
    engine.add(waiting, 0.1)
    ended = [sequence.id for outcome in run(engine) for sequence in outcome.finished]
    assert (batch.preemptions, urgent.preemptions, waiting.preemptions) == (1, 0, 0)
    assert ended == [3, 2, 1], "what came later goes before the one preempted"
    assert engine.kv_usage == 0


def test_by_priority_too_nobody_who_waits_preempts() -> None:
    engine = Engine(PROFILE, kv_tokens=160, by_priority=True)
    batch, urgent = Sequence(1, 140, 10, priority=9), Sequence(2, 64, 2)
    engine.add(batch, 0.0)
    engine.advance(0.01)
    engine.add(urgent, 0.01)
    run(engine)
    assert engine.counters.preemptions == 0
    assert batch.finished is not None
    assert urgent.first_token is not None
    assert batch.finished < urgent.first_token


def test_a_common_prefix_is_computed_once() -> None:
    engine = Engine(PROFILE)
    hashes = trace_hashes([7, 8], 128, 64, 16)
    engine.add(Sequence(1, 100, 5, hashes), 0.0)
    run(engine)
    assert engine.kv_usage == 0
    second = Sequence(2, 100, 5, hashes)
    engine.add(second, 10.0)
    step = engine.schedule(10.0)
    assert step is not None
    assert second.cached_tokens == 96
    assert step.chunks == [(second, 4)]
    assert (engine.counters.prefix_queries, engine.counters.prefix_hits) == (200, 96)


def test_a_hit_leaves_one_token_to_compute() -> None:
    engine = Engine(PROFILE)
    hashes = trace_hashes([7], 64, 64, 16)
    for number in range(2):
        engine.add(Sequence(number, 64, 1, hashes), float(number))
        run(engine)
    assert engine.counters.prefix_hits == 48
    assert engine.kv_usage == 0


def test_the_answer_is_found_again_in_the_next_turn() -> None:
    engine = Engine(PROFILE)
    hashes = trace_hashes([7, 8, 9], 192, 64, 16)
    engine.add(Sequence(1, 70, 59, hashes), 0.0)
    run(engine)
    follow_up = Sequence(2, 160, 1, hashes)
    engine.add(follow_up, 10.0)
    run(engine)
    assert follow_up.cached_tokens == 128


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = Engine(PROFILE, prefix_caching=False)
    hashes = trace_hashes([7], 64, 64, 16)
    for number in range(2):
        engine.add(Sequence(number, 64, 20, hashes), float(number))
        run(engine)
    assert engine.counters.prefix_queries == engine.counters.prefix_hits == 0


@pytest.mark.parametrize("when", ["waiting", "prefilling", "in a step", "between steps"])
def test_an_aborted_sequence_gives_everything_back(when: str) -> None:
    engine = Engine(PROFILE)
    sequence = Sequence(1, 300, 50)
    engine.add(sequence, 0.0)
    steps = {"waiting": 0, "prefilling": 1, "in a step": 4, "between steps": 4}[when]
    now = 0.0
    for _ in range(steps):
        step = engine.schedule(now)
        assert step is not None
        now = step.ends_at
        if when == "between steps" or engine.steps + 1 < steps:
            engine.complete()
    engine.abort(sequence, now)
    if engine.step is not None:
        assert engine.complete().decoded == []
    assert (engine.running, engine.waiting, engine.kv_usage) == (0, 0, 0)
    assert sequence.reason == FinishReason.ABORT
    assert engine.counters.finished.total() == 0
    assert engine.schedule(now) is None


def test_aborting_what_has_finished_changes_nothing() -> None:
    engine = Engine(PROFILE)
    sequence = Sequence(1, 10, 2)
    engine.add(sequence, 0.0)
    run(engine)
    engine.abort(sequence, 9.0)
    assert sequence.reason == FinishReason.STOP


def test_a_throttled_card_takes_longer_from_the_next_step_on() -> None:
    engine = Engine(PROFILE)
    engine.add(Sequence(1, 10, 3), 0.0)
    first = engine.schedule(0.0)
    assert first is not None
    engine.complete()
    engine.slow = 3.0
    second = engine.schedule(first.ends_at)
    assert second is not None
    assert second.ends_at - second.starts_at == pytest.approx(3 * STEP.step_time(0, 1, 10))


def test_accepted_drafts_come_on_top_and_those_beyond_the_end_are_cut() -> None:
    engine = Engine(PROFILE, speculation=Speculation(3, 1.0, Random(0)))
    sequence = Sequence(1, 10, 11)
    engine.add(sequence, 0.0)
    outcomes = run(engine)
    # 1, 4, 4 and 2 of 4 tokens.
    assert [outcome.accepted.get(1, 0) for outcome in outcomes] == [0, 3, 3, 1]
    assert sequence.generated == engine.counters.generated_tokens == 11
    counters = engine.counters
    assert (counters.steps, counters.drafts, counters.draft_tokens) == (4, 3, 9)
    # As vLLM, which counts them before it cuts.
    assert counters.accepted_tokens == 9


def test_a_step_takes_longer_by_its_drafts_and_they_use_up_its_budget() -> None:
    engine = Engine(PROFILE, speculation=Speculation(4, 0.0, Random(0)))
    engine.add(Sequence(1, 10, 3), 0.0)
    engine.schedule(0.0)
    engine.complete()
    long = Sequence(2, 400, 1)
    engine.add(long, 0.1)
    step = engine.schedule(0.1)
    assert step is not None
    assert step.chunks == [(long, 251)]
    attention = 4 * 10 + 251 * 251 / 2
    assert step.ends_at - 0.1 == pytest.approx(STEP.step_time(4 + 251, 2, 10, attention))


def test_an_average_draft_gives_what_its_acceptance_says() -> None:
    speculation = Speculation(4, 0.7, Random(0))
    engine = Engine(PROFILE, kv_tokens=32_000, speculation=speculation)
    engine.add(Sequence(1, 10, 20_000), 0.0)
    run(engine)
    assert engine.steps == pytest.approx(20_000 / speculation.tokens_per_step, rel=0.03)


def test_decoding_alone_is_run_in_one_go() -> None:
    engine = Engine(PROFILE)
    engine.add(Sequence(1, 10, 1000), 0.0)
    outcomes = run(engine)
    assert [outcome.steps for outcome in outcomes] == [1, 999]
    assert engine.counters.iteration_tokens.count == 1000
    assert engine.counters.iteration_tokens.sum == 10 + 1000


def test_the_step_in_progress_stays_so() -> None:
    engine = Engine(PROFILE)
    engine.add(Sequence(1, 10, 1000), 0.0)
    engine.advance(1.0)
    assert engine.step is not None
    assert engine.step.ends_at > 1.0
    sequence = Sequence(2, 10, 1)
    engine.add(sequence, 1.0)
    end = engine.step.ends_at
    engine.advance(end)
    assert sequence.admitted == end


def test_what_never_fits_is_refused() -> None:
    engine = Engine(PROFILE, kv_tokens=160)
    engine.add(Sequence(1, 100, 61), 0.0)
    with pytest.raises(ValueError, match="grows to 161 tokens"):
        engine.add(Sequence(2, 100, 62), 0.0)
    with pytest.raises(ValueError, match="at least one token"):
        engine.add(Sequence(3, 0, 5), 0.0)


def test_a_budget_below_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="token budget 256"):
        Engine(PROFILE, max_num_seqs=257)
    with pytest.raises(ValueError, match="KV tokens"):
        Engine(PROFILE, kv_tokens=8)
    with pytest.raises(ValueError, match=r"token budget 256 .* 16 drafts"):
        Engine(PROFILE, speculation=Speculation(16, 0.5, Random(0)))
    with pytest.raises(ValueError, match="probability"):
        Speculation(4, 1.5, Random(0))
