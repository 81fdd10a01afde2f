from random import Random

import pytest

from extproc.lab.replay.machine import Machine, Watch
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import Sequence
from extproc.predict.calibration import Typical
from extproc.predict.step import hardware_profile
from extproc.replica_state import ReplicaState
from tests.lab.replay.record import A10, address


@pytest.mark.parametrize("freezing", [True, False])
def test_polls_publish_the_frozen_gauges_of_an_aborted_engine(freezing: bool) -> None:
    machine = Machine(address(1), hardware_profile(A10), Engine)
    machine.engine.freezing_gauges = freezing
    told = ReplicaState(id=address(1), profile=A10)
    watch = Watch(machine, told, None, Typical(), 0.2, Random(0))
    sequences = [Sequence(number, 1000, 500) for number in range(3)]
    for sequence in sequences:
        machine.add(sequence, 0.0)
    machine.advance(2.0)
    for sequence in sequences:
        machine.engine.abort(sequence, 2.0)
    machine.advance(60.0)
    state = watch.poll(60.0)
    assert state is not None
    assert (state.running, state.kv_usage > 0.0) == ((3, True) if freezing else (0, False))
    machine.add(Sequence(9, 100, 1), 60.0)
    machine.advance(61.0)
    state = watch.poll(61.0)
    assert state is not None
    assert (state.running, state.waiting, state.kv_usage) == (0, 0, 0.0)
