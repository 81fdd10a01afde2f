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
