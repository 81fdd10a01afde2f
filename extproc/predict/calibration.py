"""Learns the step-time model of a replica from the counters it publishes."""

from collections.abc import Sequence
from math import exp, log
from operator import mul, truediv
from statistics import median

import numpy as np

from extproc.predict.step import StepModel
from extproc.predict.windows import (
    SECONDS,
    EngineCounts,
    Windows,
    Work,
    coefficients,
    descend,
    relative,
)

_MEMORY = 7200.0  # seconds of work in which what was learned loses two thirds of its weight
_IDLE_MEMORY = 60.0  # seconds without work: a slow replica is tried again after 20 minutes
_REACTION = 4.0
"""Seconds of work in which the speed as a whole does: a throttled card, a noisy neighbour. Shorter,
and it follows the accidents of single prompts."""
_IDLE_REACTION = 20.0
"""The same for seconds without work: one that was slow a moment ago is not believed to be fast
again because it was left alone; it fades over two minutes."""
_LATEST = 1.0  # the same for the speed that tells a sudden change
_ODD = 0.3
"""Where the latest speed departs from that as a whole by more, as a logarithm, it is no accident of
prompts: what was seen before counts for less, the more the latest departs."""
_DOUBT = 0.1  # seconds of work for which the coefficients count against the scale
_PRIOR = 1e-4
"""Weight of the profile it starts from, in windows of the longest kind: it keeps what the counters
do not tell apart. With ten times as much, a profile seven times too fast takes minutes to be
put right under light load; with a hundredth, the chance of prompts alone moves c0 by half."""
_LITTLE = 0.01  # windows' worth of work that tells nothing of replicas in general
_KNOWN = 1.0  # weight of what was known before a restart, in windows of the longest kind
_MOST_SCALE = 10.0  # the speed as a whole stays within a factor of this of the coefficients
_MUCH = 3.0
"""A stretch that was expected to take more than this many times as long as it took counts with the
inverse fourth power of the excess: however wrong a reading, it cannot weigh much. (Where all are,
the profile is wrong, and their weights are alike.)"""
_NONSENSE = 1000.0  # no profile expects work to take so many times as long as it takes


class Calibration:
    """Step-time model of one replica, learned from polls alone.

    A stretch of work took ``c0·steps + c_prefill·computed + c_batch·generated +
    c_kv·Σ(KV tokens of each step)``: every term is a difference of counters
    (:class:`~extproc.predict.windows.Windows`). Recursive least squares on relative errors, a
    stretch weighed by its length; no coefficient below zero, older stretches forgotten. What the
    counters do not determine keeps the proportions of the profile it starts from. Beside the
    coefficients a single scale follows the speed as a whole within seconds. It fades when the
    replica is idle for minutes, so that one that was slow for a while is tried again.
    """

    def __init__(self, start: StepModel, known: StepModel | None = None) -> None:
        """Starts from a profile.

        Args:
            start: its step times.
            known: what was learned before a restart; it is forgotten as if it had just been seen.
        """
        # Coefficients are counted in units of the start, so that all are near one.
        self._unit = coefficients(start)
        begin = self._unit if known is None else coefficients(known)
        self._solution = list(map(truediv, begin, self._unit))
        self._equations = np.zeros((4, 5))  # normal equations, the right side as the last column
        if known is not None:
            self._equations += _KNOWN * np.column_stack([np.eye(4), self._solution])
        self._recent = self._latest = Work(0.0, (0.0, 0.0, 0.0, 0.0))
        self._windows = Windows()
        self._polled_at: float | None = None

    @property
    def ratio(self) -> float | None:
        """Time of the work seen, against what it takes by the start; None where none was seen, or
        so long ago that it hardly counts."""
        seen, took = self._totals()
        return took / seen if seen > _LITTLE else None

    @property
    def model(self) -> StepModel:
        c0, prefill, batch, kv = map(mul, self._solution, self._unit)
        return StepModel(c0, prefill, batch, kv).slowed(self._scale)

    def poll(self, counts: EngineCounts, typical: float = 1.0) -> None:
        """Learns from one more poll.

        Args:
            counts: what it read.
            typical: :attr:`ratio` of replicas in general, to be expected of this one, too.
        """
        elapsed = 0.0 if self._polled_at is None else counts.at - self._polled_at
        self._polled_at = counts.at
        self._forget(elapsed, idle=counts.in_flight == 0)
        if (stretches := self._windows.poll(counts)) and self._sensible(stretches[0]):
            latest, *windows = stretches
            self._latest = self._latest.times(exp(-latest.seconds / _LATEST)).plus(latest)
            odd = max(abs(log(self._slower(self._latest) / self._scale)) / _ODD - 1.0, 0.0)
            keep = exp(-latest.seconds * (1.0 + odd * odd) / _REACTION)
            self._recent = self._recent.times(keep).plus(latest)
            if windows:
                self._learn(windows)
        self._solve(typical)

    def interrupted(self) -> None:
        """A poll failed: until the next one the engine may have hung, which is no work."""
        self._windows.interrupted()

    def _sensible(self, work: Work) -> bool:
        """Whether any engine could have done it: a counter may show nonsense for one poll."""
        expected: float = sum(map(mul, work.terms, self._unit))
        return expected <= _NONSENSE * work.seconds

    @property
    def _scale(self) -> float:
        return min(max(self._slower(self._recent), 1 / _MOST_SCALE), _MOST_SCALE)

    def _slower(self, work: Work) -> float:
        learned = map(mul, self._solution, self._unit)
        expected: float = sum(map(mul, learned, work.terms))
        return (work.seconds + _DOUBT) / (expected + _DOUBT)

    def _forget(self, elapsed: float, idle: bool) -> None:
        keep = exp(-elapsed / (_IDLE_MEMORY if idle else _MEMORY))
        self._equations *= keep
        if idle:
            keep = exp(-elapsed / _IDLE_REACTION)
            self._recent, self._latest = self._recent.times(keep), self._latest.times(keep)

    def _learn(self, windows: Sequence[Work]) -> None:
        # What departs from the speed so far may pass: the scale has it, the coefficients wait.
        slower = self._slower(self._latest)
        trust = min(slower, 1.0 / slower) ** 2
        rows = relative(windows, self._unit)
        seconds = np.array([[work.seconds] for work in windows])
        # So does work that should have taken far longer: one reading of a counter may be wrong.
        expected = rows[:, :4] @ np.maximum(self._solution, self._overall())[:, None]
        doubt = (np.maximum(expected, _MUCH) / _MUCH) ** 4
        weight = seconds * (trust / SECONDS[-1]) / doubt
        self._equations += (rows[:, :4] * weight).T @ rows

    def _totals(self) -> tuple[float, float]:
        *seen, took = self._equations.sum(axis=0).tolist()
        return sum(seen), took

    def _overall(self) -> float:
        seen, took = self._totals()
        return took / seen if seen > 0.0 else 1.0

    def _solve(self, typical: float) -> None:
        """Coordinate descent towards the non-negative least squares solution."""
        seen, took = self._totals()
        center = (took + _PRIOR * typical) / (seen + _PRIOR)
        descend(self._equations, [_PRIOR] * 4, [center] * 4, self._solution)


class Typical:
    """The median, over the replicas measured, of actual ÷ expected time.

    It is expected of a replica that nothing was measured on yet. Where nobody named a profile, the
    default one is wrong for all of them alike; and a replica that looks slow beside others, whose
    profiles were too slow as well and have been put right, would never be tried.

    A replica that was measured is in the median it is told, which does no harm: what was measured
    of it weighs a hundred times as much, and when that fades it leaves the median first.
    """

    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}
        self._reports = 0
        self.value = 1.0  # the median; 1 before any replica was measured

    def report(self, replica: str, ratio: float | None) -> None:
        if ratio is None:
            self._ratios.pop(replica, None)
        else:
            self._ratios[replica] = ratio
        self._reports += 1
        if self._reports >= len(self._ratios):  # once a round is soon enough
            self._reports = 0
            self.value = median(self._ratios.values()) if self._ratios else 1.0
