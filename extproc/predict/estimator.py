"""Estimates the step times of one replica from stretches of its work.

A stretch took y seconds; its terms x are steps, prompt tokens prefilled, tokens generated and KV
tokens summed over the steps, in units of the replica's profile. With weight w and decay λ::

    w = y / 16 s · min(r, 1/r)²                    r: expected by c, divided by y
    A ← λ·A + w·x·xᵀ/y²     b ← λ·b + w·x/y        normal equations of relative errors
    g = Σ b / Σ A                                  how slow the replica is, as a whole
    p = median(g_j) · nnls(Σ g_j²·A_j + κ′·I, Σ g_j·b_j + κ′)    what the fleet tells
    f = (p·b + ε) / (pᵀ·A·p + ε)                   one factor finds the speed at once
    c = nnls(A + κ·I, b + κ·f·p)                   proportions move once there is evidence
    s = (Σ y + δ) / (Σ c·x + δ)                    speed of the last seconds, against c

    seconds of a step = s · c · unit
"""

from collections.abc import Sequence
from math import exp, log
from operator import mul, truediv
from statistics import mean, median_high, median_low
from typing import NamedTuple

import numpy as np

from extproc.predict.inputs import Floats
from extproc.predict.step import StepModel
from extproc.predict.windows import SECONDS, EngineCounts, Terms, Windows, Work

_MEMORY_S = 7200.0  # of work, in which a stretch loses two thirds of its weight
_IDLE_MEMORY_S = 60.0  # the same without work: a slow replica is tried again after 20 minutes
_REACTION_S = 4.0  # memory of ``s``: a throttled card, a noisy neighbour
_IDLE_REACTION_S = 20.0  # the same without work: rest does not make a slow replica fast
_DOUBT_S = 0.1  # δ
_PROPORTIONS = 2e-4  # κ, in stretches of 16 s
_FLEET_PROPORTIONS = 0.05  # κ′, in the same: a fleet of one kind tells little of proportions
_LITTLE = 1e-5  # ε, in the same, while fewer than three replicas were measured
_NOISE, _EVEN = 1.5e-3, 5e-3
"""ε in a larger fleet is noise / (spread + floor), as squared logarithms: where replicas match
their profiles, only seconds of work show that a replica differs."""
_MEASURED = 0.01  # work, in the same, from which on a replica tells of the fleet
_MOST_SCALE = 10.0  # s stays within this factor
_WARM_UP_STEPS, _WARM_UP_SLOWER = 10, 4.0
"""An engine compiles kernels in its first steps: these alone make no replica more than 4 times
slower than its fleet."""
_NONSENSE = 1000.0  # expected ÷ actual time from which on a counter is wrong
_ROUNDS = 4  # of coordinate descent each time; it starts from the last solution

_SAME = (1.0, 1.0, 1.0, 1.0)


class Prior(NamedTuple):
    """Knowledge of a replica before its first work: that of its fleet."""

    proportions: Terms  # p
    weight: float  # ε


NOTHING_KNOWN = Prior(_SAME, _LITTLE)


class Estimator:
    """Step-time model of one replica, learned from polls."""

    def __init__(self, profile: StepModel, known: StepModel | None = None) -> None:
        """Starts from the profile, or from what was ``known``, as if learned from 16 s of work."""
        self._unit = coefficients(profile)
        self._equations = np.zeros((4, 5))  # A, and b as the last column
        self._solution = list(_SAME)
        if known is not None:
            self._solution = list(map(truediv, coefficients(known), self._unit))
            weight = 1.0 / max(sum(one * one for one in self._solution), _LITTLE)
            self._equations += weight * np.column_stack([np.eye(4), self._solution])
        self._recent = Work(0.0, (0.0, 0.0, 0.0, 0.0))
        self._windows = Windows()
        self._polled_at: float | None = None

    @property
    def measured(self) -> bool:
        """True after enough work, lately enough, to judge the replica by itself."""
        return self.evidence is not None

    @property
    def evidence(self) -> Floats | None:
        """Normal equations, b as the last column, which change with each poll; None after too
        little work."""
        return self._equations if self._equations[:, :4].sum() > _MEASURED else None

    @property
    def model(self) -> StepModel:
        c0, prefill, batch, kv = map(mul, self._solution, self._unit)
        return StepModel(c0, prefill, batch, kv).slowed(self._scale)

    def poll(self, counts: EngineCounts, fleet: Prior = NOTHING_KNOWN) -> None:
        """Learns from one more poll; ``fleet``: what is known of replicas in general."""
        elapsed = 0.0 if self._polled_at is None else counts.at - self._polled_at
        self._polled_at = counts.at
        self._forget(elapsed, idle=counts.in_flight == 0)
        stretches = [
            self._bounded(work, fleet) if _warms_up(counts, work) else work
            for work in self._windows.poll(counts)
        ]
        if any(self._expected(work, _SAME) > _NONSENSE * work.seconds for work in stretches):
            self._windows.interrupted()
        elif stretches:
            latest, *windows = stretches
            keep = exp(-latest.seconds / _REACTION_S)
            self._recent = self._recent.times(keep).plus(latest)
            for work in windows:
                self._learn(work)
        self._solve(fleet)

    def interrupted(self) -> None:
        """A poll failed: until the next one the engine may have hung, which is no work."""
        self._windows.interrupted()

    @property
    def _scale(self) -> float:
        expected = max(self._expected(self._recent, self._solution), 0.0)
        scale = (self._recent.seconds + _DOUBT_S) / (expected + _DOUBT_S)
        return min(max(scale, 1 / _MOST_SCALE), _MOST_SCALE)

    def _expected(self, work: Work, solution: Sequence[float]) -> float:
        """Seconds that the work should take."""
        return float(sum(map(mul, map(mul, solution, self._unit), work.terms)))

    def _bounded(self, work: Work, fleet: Prior) -> Work:
        most = _WARM_UP_SLOWER * self._expected(work, fleet.proportions)
        return Work(min(work.seconds, most), work.terms)

    def _forget(self, elapsed: float, idle: bool) -> None:
        self._equations *= exp(-elapsed / (_IDLE_MEMORY_S if idle else _MEMORY_S))
        if idle:
            self._recent = self._recent.times(exp(-elapsed / _IDLE_REACTION_S))

    def _learn(self, work: Work) -> None:
        ratio = self._expected(work, self._solution) / work.seconds if work.seconds else 0.0
        if ratio <= 0.0:
            return
        weight = work.seconds / SECONDS[-1] * min(ratio, 1.0 / ratio) ** 2
        [row] = relative([work], self._unit)
        self._equations += weight * np.outer(row[:4], row)

    def _solve(self, fleet: Prior) -> None:
        p = np.array(fleet.proportions)
        seen = p @ self._equations
        factor = (seen[-1] + fleet.weight) / (seen[:-1] @ p + fleet.weight)
        centers = (p * factor).tolist()
        descend(self._equations, [_PROPORTIONS] * 4, centers, self._solution)


class FleetPrior:
    """Prior of a poller's replicas, p, from those that were measured.

    Where nobody named a profile, the default one is wrong for all of them alike. Their speed is the
    median, so that an outlier teaches nobody; of an even number, the one of the middle two that is
    nearer to its profile. Those not measured yet count as their profiles say: the fast ones are
    measured first, and would make the others look fast, too.
    """

    def __init__(self) -> None:
        self._evidence: dict[str, Floats | None] = {}
        self._solution = list(_SAME)
        self._reports = 0
        self.prior = NOTHING_KNOWN

    def report(self, replica: str, evidence: Floats | None) -> None:
        """Takes what :attr:`Estimator.evidence` says of a replica."""
        self._evidence[replica] = evidence
        self._reports += 1
        if self._reports >= len(self._evidence):  # once a round is soon enough
            self._reports = 0
            self.prior = self._typical()

    def forget(self, replica: str) -> None:
        """Drops a replica that this poller scrapes no more."""
        self._evidence.pop(replica, None)

    def _typical(self) -> Prior:
        measured = [one for one in self._evidence.values() if one is not None]
        if not measured:
            return NOTHING_KNOWN
        slower = [_slower(one) for one in measured]
        all_of_them = slower + [1.0] * (len(self._evidence) - len(measured))
        middle = median_low(all_of_them), median_high(all_of_them)
        median = min(middle, key=lambda one: abs(log(one)))
        # Evidence as if all were as fast as their profiles say.
        alike = [one * ([g**2] * 4 + [g]) for one, g in zip(measured, slower, strict=True)]
        descend(np.sum(alike, axis=0), [_FLEET_PROPORTIONS] * 4, _SAME, self._solution)
        spread = mean(log(one / median) ** 2 for one in slower)
        weight = _NOISE / (spread + _EVEN) if len(slower) > 2 else _LITTLE
        return Prior(tuple(median * one for one in self._solution), weight)


def _slower(evidence: Floats) -> float:
    """Seconds of the work seen, divided by those that its profile expects."""
    *seen, took = map(float, evidence.sum(axis=0))
    return max(took / sum(seen), 1.0 / _NONSENSE)


def _warms_up(counts: EngineCounts, work: Work) -> bool:
    """True if the engine did some of the work in its first steps."""
    return 0.0 < counts.steps < _WARM_UP_STEPS


def coefficients(model: StepModel) -> Terms:
    """Seconds for one of each term of :class:`~extproc.predict.windows.Work`."""
    return model.c0, model.c_prefill, model.c_batch, model.c_kv


def relative(works: Sequence[Work], units: Sequence[float]) -> Floats:
    """Stretches of work, a row each: its terms in units of the coefficients, and 1, all divided by
    the seconds it took."""
    rows = np.array([(*work.terms, work.seconds) for work in works])
    scaled: Floats = rows * [*units, 1.0] / rows[:, -1:]
    return scaled


def descend(
    equations: Floats, weights: Sequence[float], centers: Sequence[float], solution: list[float]
) -> None:
    """Improves a non-negative least squares solution in place.

    Args:
        equations: normal equations, with the right side as the last column.
        weights: of what each coefficient is taken to be beside them.
        centers: what each is taken to be.
        solution: the coefficients; none gets below zero.
    """
    rows, pulls = equations.tolist(), list(map(mul, weights, centers))
    for _ in range(_ROUNDS):
        for k, row in enumerate(rows):
            missing = row[-1] + pulls[k] - sum(map(mul, row, solution)) - weights[k] * solution[k]
            better = solution[k] + missing / (row[k] + weights[k])
            solution[k] = better if better > 0.0 else 0.0
