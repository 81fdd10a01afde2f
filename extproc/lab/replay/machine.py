"""Pollers and replicas of a simulation; a replica can become slow, hang or go down."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from math import inf
from random import Random

from msgspec import structs

from extproc.ground.runtime import Backoff
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import StepOutcome
from extproc.poll.batch import scraped_state
from extproc.poll.metrics_text import PageFigures
from extproc.predict.estimator import Estimator, FleetPrior
from extproc.predict.step import HardwareProfile, StepModel
from extproc.replica_state import ReplicaState

_TIMEOUT_S = 1.0  # of a scrape; the default of production
_EPOCH = 1.7e9  # Unix time at time 0 of a simulation
_LONGEST_PAUSE_S = 2.0  # between failing scrapes; the default of production


class Machine:
    """Engine that can become slow, hang or go down. Callers :meth:`advance` the engine to the time
    of an event before they apply the event. A hang prolongs the step in progress."""

    def __init__(
        self, name: str, profile: HardwareProfile, make: Callable[[HardwareProfile], Engine]
    ) -> None:
        """Start the machine; ``make`` creates an engine at each start of the process."""
        self.name = name
        self.profile = profile
        self._make = make
        self._slow = 1.0
        self.goes_down()
        self.comes_up(0.0)

    @property
    def hung(self) -> bool:
        """True while the process accepts connections but does not answer."""
        return self._hung_at is not None

    @property
    def works(self) -> bool:
        return self.up and not self.hung

    @property
    def step_ends_at(self) -> float:
        """End of the step in progress; infinite without a step, or while the machine hangs."""
        step = self.engine.step
        return inf if step is None or self.hung else step.ends_at

    def slow(self, factor: float) -> None:
        self._slow = factor
        self.engine.slow_down(factor)

    def runs_at(self, step: StepModel) -> None:
        self.profile = self.engine.profile = replace(self.profile, step=step)
        self.slow(self._slow)

    def goes_down(self) -> None:
        """End the process; all its requests are lost."""
        self.engine = self._make(self.profile)
        self.engine.slow_down(self._slow)
        self.prefill_s = self.decode_s = 0.0  # as on the metrics page
        self._hung_at: float | None = None
        self.up = False  # the process runs, and accepts connections

    def hangs(self, now: float) -> None:
        """Stop all steps and answers."""
        if self.works:
            self._hung_at = now

    def comes_up(self, now: float) -> None:
        """Start the process with an empty engine, or continue after a hang."""
        if not self.up:
            self.up = True
            self.started_at = _EPOCH + now  # Unix time of the process's start
        if self._hung_at is not None:
            if (step := self.engine.step) is None:
                self.engine.schedule(now)
            else:
                step.ends_at += now - self._hung_at
            self._hung_at = None

    def advance(self, until: float) -> list[StepOutcome]:
        """Run every step that ends by ``until``; return the outcomes."""
        outcomes = self.engine.advance(until) if self.works else []
        for sequence in chain.from_iterable(outcome.finished for outcome in outcomes):
            admitted, first, end = sequence.admitted, sequence.first_token, sequence.finished
            if admitted is not None and first is not None and end is not None:
                self.prefill_s += first - admitted
                self.decode_s += end - first
        return outcomes


class MachinePoller:
    """Poller of a machine; the counterpart of :class:`extproc.poll.replica.PolledReplica`."""

    def __init__(
        self,
        machine: Machine,
        base: ReplicaState,
        believed: HardwareProfile | None,
        prior: FleetPrior,
        interval: float,
        random: Random,
    ) -> None:
        """Create a poller that scrapes every ``interval`` seconds.

        ``base`` has the fields that no scrape changes. The poller learns step times, starting from
        the profile ``believed``. Without a profile the poller publishes the step times of ``base``
        or, if ``base`` has none, the machine's true step times.
        """
        self.base = base
        self._machine = machine
        self._believed = believed
        self._estimator: Estimator | None = None
        self._prior = prior
        self._backoff = Backoff(interval, _LONGEST_PAUSE_S, random)
        self._due = 0.0
        self._waits = False  # True until the scrape of a hung machine times out
        self._state = base

    def poll(self, now: float) -> ReplicaState | None:
        """Return the state to publish if a scrape ends at ``now``; otherwise None."""
        if now < self._due:
            return None
        self._waits = self._machine.hung and not self._waits
        if self._waits:
            self._due = now + _TIMEOUT_S
            return None
        self._state = self._scrape(now) if self._machine.works else self._fail(now)
        return self._state

    def _fail(self, now: float) -> ReplicaState:
        if self._estimator is not None:
            self._estimator.interrupted()
        self._due = now + self._backoff.next()
        return structs.replace(self._state, healthy=False)

    def _scrape(self, now: float) -> ReplicaState:
        self._backoff.reset()
        figures = self._figures()
        restarted = figures.started_at != self._state.started_at
        # Without `listed`, the models of the last state do not replace those of `base`.
        last = ReplicaState(id=self.base.id) if restarted else self._state
        before = structs.replace(last, listed=False)
        if self._believed and (restarted or self._estimator is None):
            self._estimator = Estimator(self._believed.expected_step(figures.kv_tokens))
        learned, measured = self.base.learned or self._machine.engine.step_model, True
        if self._estimator is not None:
            self._estimator.poll(figures.counts(now), self._prior.prior)
            self._prior.report(self._machine.name, self._estimator.evidence)
            learned, measured = self._estimator.model, self._estimator.measured
        return scraped_state(
            self.base, before, figures, learned=learned, measured=measured, scraped_at=now
        )

    def _figures(self) -> PageFigures:
        engine = self._machine.engine
        gauges, counters = engine.gauges, engine.counters
        cached = counters.prefix_hits if engine.old_counters else counters.cached_tokens
        return PageFigures(
            models=self.base.models,
            asleep=self.base.asleep,
            max_loras=engine.adapters.slots if engine.adapters else 0,
            adapters_in_use=tuple(gauges.adapters),
            running=gauges.running,
            waiting=gauges.waiting,
            kv_usage=gauges.kv_usage,
            kv_tokens=engine.capacity,
            block_size=engine.pool.block_size,
            prefix_caching=engine.prefix_caching,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=cached,
            generated_tokens=counters.generated_tokens,
            first_tokens=counters.first_tokens,
            accepted_tokens=counters.accepted_tokens,
            preemptions=counters.preemptions,
            finished=counters.finished.total(),
            started_at=self._machine.started_at,
            prefill_s=self._machine.prefill_s,
            decode_s=self._machine.decode_s,
            cached_early=engine.old_counters,
        )
