"""Polls of simulated machines publish what polls of vLLM would."""

from functools import partial
from random import Random

import pytest

from extproc.lab.replay.machine import Machine, MachinePoller
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import Sequence
from extproc.predict.estimator import FleetPrior
from extproc.predict.step import hardware_profile
from extproc.replica_state import ReplicaState
from tests.lab.replay.record import A10, address


@pytest.mark.parametrize("freezing", [True, False])
def test_polls_publish_the_frozen_gauges_of_an_aborted_engine(freezing: bool) -> None:
    machine = Machine(address(1), hardware_profile(A10), Engine)
    machine.engine.freezing_gauges = freezing
    base = ReplicaState(id=address(1), profile=A10)
    poller = MachinePoller(machine, base, None, FleetPrior(), 0.2, Random(0))
    sequences = [Sequence(number, 1000, 500) for number in range(3)]
    for sequence in sequences:
        machine.engine.add(sequence, 0.0)
    machine.advance(2.0)
    for sequence in sequences:
        machine.engine.abort(sequence, 2.0)
    machine.advance(60.0)
    state = poller.poll(60.0)
    assert state is not None
    assert (state.running, state.kv_usage > 0.0) == ((3, True) if freezing else (0, False))
    machine.engine.add(Sequence(9, 100, 1), 60.0)
    machine.advance(61.0)
    state = poller.poll(61.0)
    assert state is not None
    assert (state.running, state.waiting, state.kv_usage) == (0, 0, 0.0)


def test_polls_publish_the_start_of_each_process() -> None:
    machine = Machine(address(1), hardware_profile(A10), Engine)
    poller = MachinePoller(machine, ReplicaState(id=address(1)), None, FleetPrior(), 0.2, Random(0))
    for number in range(3):
        machine.engine.add(Sequence(number, 100, 500), 0.0)
    machine.advance(1.0)
    before = poller.poll(1.0)
    machine.hangs(2.0)
    machine.comes_up(3.0)
    after_hang = poller.poll(4.0)
    machine.goes_down()
    machine.comes_up(5.0)
    machine.engine.add(Sequence(3, 100, 500), 5.0)
    machine.advance(10.0)
    after = poller.poll(10.0)
    assert before is not None
    assert after_hang is not None
    assert after is not None
    assert after_hang.started_at == before.started_at > 0.0
    assert after.started_at == before.started_at + 5.0
    assert after.steps > after_hang.steps
    assert (after_hang.most_running, after.most_running) == (3, 1)


@pytest.mark.parametrize("old", [True, False])
def test_polls_of_old_counters_count_cached_tokens_before_their_prompt(old: bool) -> None:
    machine = Machine(address(1), hardware_profile(A10), partial(Engine, old_counters=old))
    poller = MachinePoller(machine, ReplicaState(id=address(1)), None, FleetPrior(), 0.2, Random(0))
    machine.engine.add(Sequence(1, 320, 1, range(20)), 0.0)
    machine.advance(10.0)
    machine.engine.add(Sequence(2, 4000, 1, range(20)), 10.0)  # takes two steps
    machine.advance(10.0)
    machine.advance(machine.step_ends_at)
    state = poller.poll(11.0)
    assert state is not None
    assert (state.prompt_tokens, state.cached_tokens) == (320, 320 if old else 0)
