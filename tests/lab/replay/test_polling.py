"""Polls of simulated machines publish what polls of vLLM would."""

from functools import partial
from math import isfinite
from random import Random
from typing import Any

import pytest

from extproc.lab.replay.machine import Machine, MachinePoller
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.features import LoadedAdapters, Speculation
from extproc.lab.simulator.metrics import Metrics
from extproc.lab.simulator.steps import Sequence
from extproc.poll.metrics_text import read_metrics
from extproc.predict.estimator import FleetPrior
from extproc.predict.step import hardware_profile
from extproc.replica_state import EngineFigures, ReplicaState
from tests.lab.replay.record import A10, MODEL, address


@pytest.mark.parametrize("options", [{}, {"old_counters": True}, {"prefix_caching": False}])
def test_polls_publish_the_figures_of_the_metrics_page(options: dict[str, Any]) -> None:
    drafts, loaded = Speculation(3, 0.7, Random(0)), LoadedAdapters(2, 0.1)
    engine = partial(Engine, block_size=32, kv_tokens=12_800, speculation=drafts, adapters=loaded)
    machine = Machine(address(1), hardware_profile(A10), partial(engine, **options))
    poller = MachinePoller(machine, ReplicaState(id=address(1)), None, FleetPrior(), 0.2, Random(0))
    page, names = Metrics(machine.engine, MODEL), EngineFigures.__struct_fields__
    for n in range(10):
        sequence = Sequence(n, 3000, 99 * n, range(50), f"adapter-{n % 3}")
        machine.engine.add(sequence, 0.0)
    machine.advance(0.0)
    while isfinite(machine.step_ends_at):
        for outcome in machine.advance(machine.step_ends_at):
            for sequence in outcome.first:
                page.first_token(sequence)
            for sequence in outcome.finished:
                page.sequence_finished(sequence, 0)
            state, read = poller.poll(outcome.ends_at), read_metrics(page.page().encode())
            differ = {name for name in names if getattr(state, name) != getattr(read, name)}
            assert differ == {"models", "started_at"}
