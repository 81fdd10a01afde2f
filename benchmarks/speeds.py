"""Whether a change of a replica's speed is learned."""

from dataclasses import dataclass, replace
from math import inf

from benchmarks.machine import Machine
from extproc.predict.inputs import FleetView
from extproc.predict.step import StepModel

_AFTER = 30.0
"""Seconds after a change by which it should be learned."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What an engine has done so far."""

    steps: int
    computed: int
    generated: int

    @classmethod
    def of(cls, machine: Machine) -> "_Work":
        counters = machine.engine.counters
        computed = counters.prompt_tokens - counters.cached_tokens
        return cls(machine.engine.steps, computed, counters.generated_tokens)


@dataclass(frozen=True, slots=True)
class _Change:
    at: float
    machine: Machine
    slow: float
    before: _Work


@dataclass(frozen=True, slots=True)
class LearnedSpeed:
    """What was believed of a replica some time after its speed changed."""

    replica: str
    at: float
    slow: float
    ratio: float
    """The average step since the change, as learned, over what it truly takes."""


class Speeds:
    """Compares learned step times with the truth some time after each change."""

    def __init__(self) -> None:
        self.learned: list[LearnedSpeed] = []
        self._changes: list[_Change] = []

    @property
    def due(self) -> float:
        """When the next comparison is to be made."""
        return self._changes[0].at + _AFTER if self._changes else inf

    def changed(self, machine: Machine, slow: float, now: float) -> None:
        """A replica's speed is another from now on; changes come in order of time."""
        self._changes.append(_Change(now, machine, slow, _Work.of(machine)))

    def compare(self, now: float, view: FleetView) -> None:
        """Makes the comparison that is due, with what the policies see."""
        change = self._changes.pop(0)
        name = change.machine.name
        if name not in view.ids:
            return  # it is down
        index = view.ids.index(name)
        learned = StepModel(
            float(view.c0[index]),
            float(view.c_prefill[index]),
            float(view.c_batch[index]),
            float(view.c_kv[index]),
        )
        truth = replace(change.machine.step_model, c_att=0.0)
        ratio = _average_step(learned, change) / _average_step(truth, change)
        self.learned.append(LearnedSpeed(name, now, change.slow, ratio))


def _average_step(model: StepModel, change: _Change) -> float:
    """Seconds of a step of the kind the replica has run since the change."""
    work, engine = _Work.of(change.machine), change.machine.engine
    steps = max(work.steps - change.before.steps, 1)
    return model.step_time(
        prefill=(work.computed - change.before.computed) / steps,
        batch=(work.generated - change.before.generated) / steps,
        kv=engine.kv_usage * engine.capacity,
    )
