"""Batch limit and tokens per step are learned from polls of a simulated engine."""

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import count
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.lab.replay.machine import Machine, MachinePoller
from extproc.lab.replay.routers import VirtualClock
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.features import Speculation
from extproc.lab.simulator.steps import Sequence
from extproc.poll.batch import scraped_state
from extproc.poll.metrics_text import PageFigures
from extproc.predict.completion import predict
from extproc.predict.estimator import FleetPrior
from extproc.predict.lengths import OutputLengths
from extproc.predict.step import hardware_profile
from extproc.replica_state import ReplicaState
from tests.fakes import MODEL, chat, replica

A10 = "llama-8b-a10"
POLL_S = 0.2
TOKENS = 200


class Loaded:
    """A replica with a constant number of requests in flight, and the router that sent them."""

    def __init__(
        self, in_flight: int, prompt: int = 50, speculation: Speculation | None = None
    ) -> None:
        self.clock = VirtualClock()
        self.fleet = Fleet(OutputLengths(), self.clock, self.clock)
        engine = partial(Engine, max_num_seqs=64, speculation=speculation)
        self.machine = Machine(replica(1), hardware_profile(A10), engine)
        state = ReplicaState(id=replica(1), profile=A10, models=(MODEL,))
        self.fleet.put(state)
        profile = self.machine.profile
        self._watch = MachinePoller(self.machine, state, profile, FleetPrior(), POLL_S, Random(0))
        self._in_flight, self._prompt = in_flight, prompt
        self._random = Random(1)
        self._numbers = count(1)
        self._tickets: dict[int, Ticket] = {}

    def polls(self, seconds: float) -> Iterator[ReplicaState]:
        """Yields the states that reach the router; replaces ended requests at once."""
        end = self.clock.time + seconds
        while self.clock.time < end:
            self._run_until(self.clock.time + POLL_S)
            if (state := self._watch.poll(self.clock.time)) is not None:
                self.fleet.put(state)
                yield state

    def wait_s(self) -> float:
        """Predicted wait for a place in the batch."""
        view = self.fleet.view(MODEL)
        sequences = self.fleet.sequences(view)
        predicted = predict(chat(self._prompt, TOKENS), 100.0, view, sequences, np.zeros(1))
        return predicted.admission.item()

    def _run_until(self, until: float) -> None:
        while (ends_at := self._next_step()) <= until:
            for outcome in self.machine.advance(ends_at):
                self.clock.time = outcome.ends_at
                for sequence in outcome.finished:
                    self.fleet.release(self._tickets.pop(sequence.id))
        self.clock.time = until

    def _next_step(self) -> float:
        while len(self._tickets) < self._in_flight:
            number = next(self._numbers)
            self._tickets[number] = self.fleet.dispatch(replica(1), chat(self._prompt, TOKENS))
            tokens = self._random.randint(1, TOKENS)
            self.machine.engine.add(Sequence(number, self._prompt, tokens), self.clock.time)
        if self.machine.step_ends_at == inf:
            self.machine.advance(self.clock.time)
        return self.machine.step_ends_at


def test_batch_limit_stays_while_sequences_end_between_polls() -> None:
    loaded = Loaded(in_flight=80)
    states = deque(loaded.polls(5.0), 10)
    running = set[int]()
    for state in loaded.polls(20.0):
        running.add(state.running)
        assert loaded.fleet.view(MODEL).max_num_seqs.tolist() == [64]
        assert loaded.wait_s() > 0.0
    assert len(running) > 1, "sequences end in some steps"
    assert states[0].max_num_seqs == 64


@pytest.mark.parametrize(("in_flight", "prompt"), [(4, 6000), (10, 3000), (30, 1000)])
def test_requests_waiting_for_prefill_teach_no_batch_limit(in_flight: int, prompt: int) -> None:
    states = list(Loaded(in_flight, prompt).polls(20.0))
    assert sum(state.waiting > 0 and state.kv_usage < 0.9 for state in states) > 5
    assert {state.max_num_seqs for state in states} == {0}


@pytest.mark.parametrize("tokens", [1.0, 4.0])
def test_tokens_per_step_follow_draft_acceptance_within_a_minute(tokens: float) -> None:
    """After ten hours of mostly accepted drafts, all or none are accepted."""
    drafts = Speculation(3, 0.7, Random(0))
    loaded = Loaded(in_flight=1, speculation=drafts)
    deque(loaded.polls(60.0), 0)
    [usual] = loaded.fleet.view(MODEL).tokens_per_step
    assert usual == pytest.approx(drafts.tokens_per_step, rel=0.1)
    counters = loaded.machine.engine.counters
    counters.generated_tokens *= 600
    counters.accepted_tokens *= 600
    next(loaded.polls(1.0))
    loaded.machine.engine.speculation = Speculation(3, float(tokens == 4.0), Random(0))
    deque(loaded.polls(60.0), 0)
    [after] = loaded.fleet.view(MODEL).tokens_per_step
    assert after == pytest.approx(tokens, rel=0.1)


def polled(steps: int, **figures: Any) -> PageFigures:
    """Figures of a process whose four running sequences all decode while a fifth waits."""
    usual: dict[str, Any] = {
        "running": 4,
        "waiting": 1,
        "kv_usage": 0.05,
        "generated_tokens": 4.0 * steps,
    }
    return PageFigures(steps=steps, **(usual | figures))


NINE_RUN = polled(30, running=9, generated_tokens=210.0)
NINE_STILL_RUN = polled(40, running=9, generated_tokens=300.0)


@pytest.mark.parametrize(
    ("polls", "expected"),
    [
        pytest.param((polled(10), polled(20)), 4, id="full in two polls"),
        pytest.param((polled(10), polled(20, running=3)), 4, id="first poll has more"),
        pytest.param(
            (polled(10, running=3), polled(20), polled(30, running=3, waiting=0)), 4, id="full once"
        ),
        pytest.param((polled(10), polled(20), NINE_RUN, NINE_STILL_RUN), 9, id="refuted"),
        pytest.param(
            (polled(10), polled(20), structs.replace(NINE_RUN, waiting=0)),
            0,
            id="refuted, not full",
        ),
        pytest.param((polled(10), polled(20, waiting=0)), 0, id="nobody waits any more"),
        pytest.param((polled(10, waiting=0), polled(20)), 0, id="nobody waited before"),
        pytest.param((polled(10), polled(10)), 0, id="engine is paused"),
        pytest.param((polled(10), polled(20, kv_usage=0.95)), 0, id="KV cache is full"),
        pytest.param((polled(10), polled(12)), 0, id="too few steps"),
        pytest.param(
            (polled(5, running=9, waiting=0), polled(10), polled(20)), 0, id="nine ran before"
        ),
        pytest.param((polled(10), polled(20, running=5)), 0, id="fifth is in prefill"),
        pytest.param(
            (polled(10), polled(20, generated_tokens=120.0, accepted_tokens=60.0)),
            0,
            id="only two decode",
        ),
    ],
)
def test_batch_limit_is_learned_from_polls_of_one_process(
    polls: tuple[PageFigures, ...], expected: int
) -> None:
    state = ReplicaState(id=replica(1))
    for now in polls:
        state = scraped_state(state, state, now)
    assert state.max_num_seqs == expected
