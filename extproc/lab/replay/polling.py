"""What the production poller would publish of a simulated replica."""

from random import Random

from msgspec import structs

from extproc.ground.runtime import Backoff
from extproc.lab.replay.machine import Machine
from extproc.poll.metrics_text import EngineFigures
from extproc.predict.calibration import Calibration, Typical
from extproc.predict.step import StepModel
from extproc.replica_state import ReplicaState

_TIMEOUT = 1.0
"""Seconds until a scrape of a replica that hangs is given up, as configured by default."""
_LONGEST_PAUSE = 2.0
"""Seconds between scrapes of a replica that does not answer, as configured by default."""


class Watch:
    """Scrapes one replica; the counterpart of :class:`extproc.poll.replica.PolledReplica`."""

    def __init__(
        self,
        machine: Machine,
        told: ReplicaState,
        believed: StepModel | None,
        typical: Typical,
        interval: float,
        random: Random,
    ) -> None:
        """A watch of one.

        Args:
            machine: which.
            told: what is known of it beside its figures.
            believed: the step times to start learning from; None: what is told of them, or else the
                truth, is known.
            typical: what the others turned out to be.
            interval: seconds between two scrapes.
            random: of the waits between scrapes that fail.
        """
        self.told = told
        self._machine = machine
        self._calibration = None if believed is None else Calibration(believed)
        self._typical = typical
        self._backoff = Backoff(interval, _LONGEST_PAUSE, random)
        self._due = 0.0
        self._waits = False  # for an answer that does not come
        self._state = told

    def poll(self, now: float) -> ReplicaState | None:
        """The state to publish; None where no scrape ends now."""
        if now < self._due:
            return None
        self._waits = self._machine.hung and not self._waits
        if self._waits:
            self._due = now + _TIMEOUT
            return None
        self._state = self._scrape(now) if self._machine.works else self._fail(now)
        return self._state

    def _fail(self, now: float) -> ReplicaState:
        if self._calibration is not None:
            self._calibration.interrupted()
        self._due = now + self._backoff.next()
        return structs.replace(self._state, healthy=False)

    def _scrape(self, now: float) -> ReplicaState:
        self._backoff.reset()
        figures = self._figures()
        learned = {
            "learned": self._learn(figures, now),
            "measured": self._calibration is None or self._calibration.ratio is not None,
        }
        update = figures.fields() | learned | {"scraped_at": now}
        return structs.replace(self.told, **update)

    def _figures(self) -> EngineFigures:
        engine = self._machine.engine
        gauges, counters = engine.gauges, engine.counters
        lengths = self._machine.output_lengths
        return EngineFigures(
            models=self.told.models,
            running=gauges.running,
            waiting=gauges.waiting,
            kv_usage=gauges.kv_usage,
            kv_tokens=engine.capacity,
            block_size=engine.pool.block_size,
            prefix_caching=engine.prefix_caching,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            first_tokens=counters.first_tokens,
            accepted_tokens=counters.accepted_tokens,
            preemptions=counters.preemptions,
            finished=counters.finished.total(),
            output_lengths=tuple(zip(lengths.bounds, map(float, lengths.counts), strict=False)),
        )

    def _learn(self, figures: EngineFigures, now: float) -> StepModel:
        if self._calibration is None:
            return self.told.learned or self._machine.step_model
        self._calibration.poll(figures.counts(now), self._typical.value)
        self._typical.report(self._machine.name, self._calibration.ratio)
        return self._calibration.model
