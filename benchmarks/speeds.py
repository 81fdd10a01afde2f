"""Whether a change of a replica's speed is learned."""

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from extproc.lab.replay.machine import Machine
from extproc.predict.inputs import FleetView, Floats
from extproc.predict.step import StepModel

_AFTER = 30.0  # seconds after a change by which it should be learned


@dataclass(frozen=True, slots=True)
class LearnedSpeed:
    """What was believed of a replica some time after its speed changed."""

    replica: str
    at: float
    slow: float
    ratio: float  # the average step since the change, as learned, over what it truly takes


class Speeds:
    """Compares learned step times with the truth some time after each change."""

    def __init__(self) -> None:
        self.learned: list[LearnedSpeed] = []
        self._changes: list[tuple[float, Machine, float, Floats]] = []
        """When, whose, how slow since, and what it had done until then."""

    @property
    def due(self) -> float:
        return self._changes[0][0] + _AFTER if self._changes else inf

    def changed(self, machine: Machine, slow: float, now: float) -> None:
        """A replica's speed is another from now on; changes come in order of time."""
        self._changes.append((now, machine, slow, _work(machine)))

    def compare(self, now: float, view: FleetView) -> None:
        _, machine, slow, before = self._changes.pop(0)
        if machine.name not in view.ids:
            return  # it is down
        index = view.ids.index(machine.name)
        each = view.c0, view.c_prefill, view.c_batch, view.c_kv
        learned = StepModel(*(float(values[index]) for values in each))
        truth = replace(machine.step_model, c_att=0.0)
        steps, computed, generated = _work(machine) - before
        average = {
            "prefill": computed / max(steps, 1.0),
            "batch": generated / max(steps, 1.0),
            "kv": machine.engine.kv_usage * machine.engine.capacity,
        }
        ratio = learned.step_time(**average) / truth.step_time(**average)
        self.learned.append(LearnedSpeed(machine.name, now, slow, ratio))


def _work(machine: Machine) -> Floats:
    """Steps, prompt tokens computed and tokens generated so far."""
    counters = machine.engine.counters
    computed = counters.prompt_tokens - counters.cached_tokens
    return np.array([machine.engine.steps, computed, counters.generated_tokens], float)
