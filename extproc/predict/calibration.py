"""Learns the step-time model of a replica from the counters it publishes."""

from collections.abc import Sequence
from math import exp
from operator import mul

import numpy as np

from extproc.fleet.view import Floats
from extproc.predict.step import StepModel
from extproc.predict.windows import SECONDS, EngineCounts, Windows, Work

_MEMORY = 7200.0
"""Seconds of work in which what was learned loses two thirds of its weight."""
_IDLE_MEMORY = 60.0
"""The same for seconds without work: one that was slow for long is tried again after 20 minutes."""
_REACTION = 4.0
"""Seconds of work in which the speed as a whole does: a throttled card, a noisy neighbour. Shorter,
and it follows the accidents of single prompts."""
_IDLE_REACTION = 30.0
"""The same for seconds without work: one that was slow a moment ago is not believed to be fast
again because it was left alone; it fades over two minutes."""
_DOUBT = 0.25
"""Seconds of work that count for the coefficients when the speed as a whole is told from them."""
_PRIOR = 1e-4
"""Weight of the profile it starts from, in windows of the longest kind: it keeps what the counters
do not tell apart. With ten times as much, a profile seven times too fast takes minutes to be
put right under light load; with a hundredth, the chance of prompts alone moves c0 by half."""
_LITTLE = 0.01
"""Windows' worth of work that tells nothing of replicas in general."""
_KNOWN = 1.0
"""Weight of what was known before a restart, in windows of the longest kind."""
_MOST_SCALE = 10.0
"""The speed as a whole stays within a factor of this of the coefficients."""
_ROUNDS = 4
"""Of coordinate descent at each poll; it starts from the last solution."""


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
        self._start = start
        # Coefficients are counted in units of the start, so that all are near one.
        self._unit = _coefficients(start)
        self._solution = np.ones(4) if known is None else _coefficients(known) / self._unit
        self._normal = np.zeros((4, 4)) if known is None else _KNOWN * np.eye(4)
        self._right = self._normal @ self._solution
        self._recent = Work(0.0, np.zeros(4))
        self._windows = Windows()
        self._polled_at: float | None = None

    @property
    def ratio(self) -> float | None:
        """Time of the work seen, against what it takes by the start; None where none was seen, or
        so long ago that it hardly counts."""
        seen = float(self._normal.sum())
        return float(self._right.sum()) / seen if seen > _LITTLE else None

    @property
    def model(self) -> StepModel:
        """The step-time model as learned so far."""
        c0, prefill, batch, kv = (self._solution * self._unit).tolist()
        # Attention leaves no trace in the counters: it is taken to differ as the prefill does.
        attention = self._start.c_att * float(self._solution[1])
        return StepModel(c0, prefill, batch, kv, attention).slowed(self._scale)

    def poll(self, counts: EngineCounts, typical: float = 1.0) -> None:
        """Learns from one more poll.

        Args:
            counts: what it read.
            typical: :attr:`ratio` of replicas in general, to be expected of this one, too.
        """
        elapsed = 0.0 if self._polled_at is None else counts.at - self._polled_at
        self._polled_at = counts.at
        self._forget(elapsed, idle=counts.in_flight == 0)
        if stretches := self._windows.poll(counts):
            latest, *windows = stretches
            keep = exp(-latest.seconds / _REACTION)
            self._recent = Work(
                self._recent.seconds * keep + latest.seconds,
                self._recent.terms * keep + latest.terms * self._unit,
            )
            if windows:
                self._learn(windows)
        self._solve(typical)

    @property
    def _scale(self) -> float:
        expected = float(self._solution @ self._recent.terms)
        scale = (self._recent.seconds + _DOUBT) / (expected + _DOUBT)
        return min(max(scale, 1 / _MOST_SCALE), _MOST_SCALE)

    def _forget(self, elapsed: float, idle: bool) -> None:
        keep = exp(-elapsed / (_IDLE_MEMORY if idle else _MEMORY))
        self._normal *= keep
        self._right *= keep
        keep = exp(-elapsed / _IDLE_REACTION) if idle else 1.0
        self._recent = Work(self._recent.seconds * keep, self._recent.terms * keep)

    def _learn(self, windows: Sequence[Work]) -> None:
        # What departs from the speed so far may pass: the scale has it, the coefficients wait.
        trust = min(self._scale, 1.0 / self._scale) ** 2
        seconds = np.array([work.seconds for work in windows])
        relative = np.stack([work.terms for work in windows]) * self._unit / seconds[:, None]
        weighed = relative.T * (trust * seconds / SECONDS[-1])
        self._normal += weighed @ relative
        self._right += weighed.sum(axis=1)

    def _solve(self, typical: float) -> None:
        """Coordinate descent towards the non-negative least squares solution."""
        overall = (self._right.sum() + _PRIOR * typical) / (self._normal.sum() + _PRIOR)
        normal = (self._normal + _PRIOR * np.eye(4)).tolist()
        right = (self._right + _PRIOR * overall).tolist()
        solution = self._solution.tolist()
        for _ in range(_ROUNDS):
            for k, row in enumerate(normal):
                missing = right[k] - sum(map(mul, row, solution))
                solution[k] = max(solution[k] + missing / row[k], 0.0)
        self._solution = np.array(solution)


def _coefficients(model: StepModel) -> Floats:
    return np.array([model.c0, model.c_prefill, model.c_batch, model.c_kv])
