"""Invariants of the engine for random arrivals and aborts."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.features import Speculation
from extproc.lab.simulator.steps import FinishReason, Sequence
from extproc.predict.step import HardwareProfile, StepModel

PROFILE = HardwareProfile("test", StepModel(0.013, 1e-4, 1e-3, 1e-5, 1e-8), 160, 24, 6)
BLOCK = 4


@dataclass(frozen=True)
class SequenceArrival:
    gap: float
    prompt: int
    output: int
    prefix: int
    priority: int
    patience: float | None


@dataclass(frozen=True)
class Event:
    at: float
    sequence: Sequence
    abort: bool

    def apply(self, engine: Engine) -> None:
        if not self.abort:
            engine.add(self.sequence, self.at)
        elif self.sequence.finished is None:
            engine.abort(self.sequence, self.at)


arrivals = st.lists(
    st.builds(
        SequenceArrival,
        gap=st.floats(0, 0.5),
        prompt=st.integers(1, 90),
        output=st.integers(0, 60),
        prefix=st.integers(0, 2),
        priority=st.integers(-1, 1),
        patience=st.none() | st.floats(0, 1.0),
    ),
    max_size=25,
)


def events(arrivals: list[SequenceArrival]) -> list[Event]:
    listed, now = [], 0.0
    for number, arrival in enumerate(arrivals):
        now += arrival.gap
        blocks = (arrival.prompt + arrival.output) // BLOCK
        # Prompts of one prefix differ after 40 tokens.
        hashes = [
            arrival.prefix * 1000 + block if block < 10 else (number + 5) * 1000 + block
            for block in range(blocks)
        ]
        sequence = Sequence(number, arrival.prompt, arrival.output, hashes)
        sequence.priority = arrival.priority
        listed.append(Event(now, sequence, abort=False))
        if arrival.patience is not None:
            listed.append(Event(now + arrival.patience, sequence, abort=True))
    return sorted(listed, key=lambda event: event.at)


def by_advance(engine: Engine, listed: list[Event]) -> None:
    for event in listed:
        engine.advance(event.at)
        check(engine)
        event.apply(engine)
    engine.advance(float("inf"))


def step_by_step(engine: Engine, listed: list[Event]) -> None:
    now, pending = 0.0, list(listed)
    while True:
        step = engine.schedule(now)
        check(engine)
        if step is None:
            if not pending:
                return
            now = max(now, pending[0].at)
            pending.pop(0).apply(engine)
            continue
        while pending and pending[0].at < step.ends_at:
            pending.pop(0).apply(engine)
        engine.complete()
        check(engine)
        now = step.ends_at


def check(engine: Engine) -> None:
    assert 0 <= engine.pool.free <= engine.pool.blocks
    assert engine.running <= engine.max_num_seqs
    if not engine.running:
        assert engine.kv_usage == 0


def outcome(
    drive: Callable[[Engine, list[Event]], None],
    arrivals: list[SequenceArrival],
    kv_tokens: int,
    drafts: int,
    by_priority: bool,
    cold_steps: int,
) -> tuple[Engine, list[Sequence]]:
    speculation = Speculation(drafts, 0.7, Random(1)) if drafts else None
    options: dict[str, Any] = {"speculation": speculation, "by_priority": by_priority}
    options |= {"cold_steps": cold_steps, "old_counters": True}
    engine = Engine(PROFILE, BLOCK, kv_tokens, max_num_seqs=4, **options)
    listed = events(arrivals)
    drive(engine, listed)
    return engine, [event.sequence for event in listed if not event.abort]


sizes = st.sampled_from([152, 200, 400, 4000])
drafts = st.sampled_from([0, 0, 1, 5])
cold_steps = st.sampled_from([0, 0, 7])


@given(arrivals, sizes, drafts, st.booleans(), cold_steps)
def test_single_steps_and_advance_agree_and_leak_no_blocks(
    arrivals: list[SequenceArrival], kv_tokens: int, drafts: int, by_priority: bool, cold_steps: int
) -> None:
    options = arrivals, kv_tokens, drafts, by_priority, cold_steps
    stepwise, single = outcome(step_by_step, *options)
    advanced, many = outcome(by_advance, *options)
    check_end(advanced, many)
    assert [_record(sequence) for sequence in single] == [_record(sequence) for sequence in many]
    assert _totals(stepwise) == _totals(advanced)


def check_end(engine: Engine, sequences: list[Sequence]) -> None:
    assert (engine.running, engine.waiting, engine.kv_usage) == (0, 0, 0)
    assert engine.pool.free == engine.pool.blocks
    for sequence in sequences:
        assert sequence.finished is not None
        assert not sequence.held
        if sequence.reason == FinishReason.ABORT:
            assert sequence.generated <= sequence.output_tokens
        else:
            assert sequence.generated == sequence.output_tokens
    counters = engine.counters
    whole = [sequence for sequence in sequences if sequence.reason != FinishReason.ABORT]
    assert counters.finished.total() == len(whole)
    assert counters.generated_tokens == sum(sequence.generated for sequence in sequences)
    prefilled = [sequence for sequence in sequences if sequence.first_token is not None]
    assert counters.first_tokens == len(prefilled)
    assert counters.prompt_tokens == sum(sequence.prompt_tokens for sequence in prefilled)
    computed = counters.prompt_tokens - counters.cached_tokens
    assert counters.iteration_tokens.sum == counters.generated_tokens + computed
    assert counters.steps <= engine.steps


_record = attrgetter(
    *("reason", "admitted", "first_token", "finished", "generated", "cached_tokens", "preemptions")
)


def _totals(engine: Engine) -> tuple[object, ...]:
    counters = engine.counters
    totals = counters.preemptions, counters.prefix_hits, counters.finished
    return engine.steps, *totals, counters.iteration_tokens.cumulative()
