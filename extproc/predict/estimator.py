"""Estimates the step times of one replica from stretches of its work.

A stretch took y seconds. Its terms x are steps, prompt tokens prefilled, tokens generated, and KV
tokens summed over the steps, each multiplied by its coefficient in the replica's profile. The
coefficients c, as multiples of the profile's, follow by non-negative least squares (nnls)::

    w = y / (16 seconds) · min(r, 1/r)²            weight; r: seconds expected by c, divided by y
    A ← λ·A + w·x·xᵀ/y²     b ← λ·b + w·x/y        normal equations of relative errors; λ: decay
    g = Σ b / Σ A                                  slowness of the replica: actual ÷ profile's
    p = median(g_j) · nnls(Σ g_j²·A_j + κ′·I, Σ g_j·b_j + κ′)    prior from replicas j of the fleet
    f = (p·b + ε) / (pᵀ·A·p + ε)                   slowness against the prior, fast to learn
    c = nnls(A + κ·I, b + κ·f·p)                   proportions differ from p only by evidence
    σ = (Σ y + δ) / (Σ c·x + δ)                    slowness of the last seconds, against c

    coefficient of the step-time model = σ · c · coefficient of the profile
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

_MEMORY_S = 7200.0  # seconds of work in which the weight of a stretch falls by a factor e
_IDLE_MEMORY_S = 60.0  # the same for idle seconds: a slow replica is retried after about 15 minutes
_REACTION_S = 4.0  # memory of σ in seconds of work: for a throttled GPU or a noisy neighbour
_IDLE_REACTION_S = 20.0  # memory of σ in seconds of idling: an idle replica may still be slow
_PRIOR_S = 0.1  # δ
# The next five are weights, in stretches of 16 s:
_PROPORTIONS = 2e-4  # κ
_FLEET_PROPORTIONS = 0.05  # κ′: replicas of one kind say little about proportions
_SMALL_FLEET = 1e-5  # ε while fewer than three replicas are measured
_NOISE, _EVEN = 1.5e-3, 5e-3
"""With three measured replicas or more, the prior weighs ε = _NOISE / (mean of log²(g ÷ median) +
_EVEN). If replicas match their profiles, only seconds of work show that a replica differs."""
_MEASURED = 0.01  # sum of A above which a replica counts as measured
_MOST_SCALE = 10.0  # bound of σ and of 1/σ
_WARM_UP_STEPS, _WARM_UP_SLOWER = 10, 4.0
"""An engine compiles kernels in its first 10 steps. A stretch of work in these steps counts as at
most 4 times as long as the prior expects."""
_WRONG_COUNTER = 1000.0  # expected ÷ actual time above which a counter must be wrong
_ROUNDS = 4  # of coordinate descent after each poll, starting from the last solution

_SAME = (1.0, 1.0, 1.0, 1.0)


class Prior(NamedTuple):
    """Coefficients that a replica is expected to have before its first work."""

    coefficients: Terms  # p, as multiples of the profile's
    weight: float  # ε


PROFILE_PRIOR = Prior(_SAME, _SMALL_FLEET)


class Estimator:
    """Step-time model of one replica, learned from polls."""

    def __init__(self, profile: StepModel, known: StepModel | None = None) -> None:
        """Starts from the step times ``known``, which count as much as 16 s of work; None: starts
        from the profile."""
        self._unit = coefficients(profile)
        self._equations = np.zeros((4, 5))  # A, and b as the last column
        self._solution = list(_SAME)
        if known is not None:
            self._solution = list(map(truediv, coefficients(known), self._unit))
            squares = sum(coefficient * coefficient for coefficient in self._solution)
            weight = 1.0 / max(squares, _SMALL_FLEET)
            self._equations += weight * np.column_stack([np.eye(4), self._solution])
        self._recent = Work(0.0, (0.0, 0.0, 0.0, 0.0))
        self._windows = Windows()
        self._polled_at: float | None = None

    @property
    def measured(self) -> bool:
        """True after enough recent work to know the replica's own speed."""
        return self.evidence is not None

    @property
    def evidence(self) -> Floats | None:
        """Normal equations A·c = b, with b as the last column; None if the replica is not measured.
        The next poll changes the array in place."""
        return self._equations if self._equations[:, :4].sum() > _MEASURED else None

    @property
    def model(self) -> StepModel:
        c0, prefill, batch, kv = map(mul, self._solution, self._unit)
        return StepModel(c0, prefill, batch, kv).slowed(self._scale)

    def poll(self, counts: EngineCounts, fleet: Prior = PROFILE_PRIOR) -> None:
        """Learns step times from the counts of a poll; ``fleet``: the prior of the fleet."""
        elapsed = 0.0 if self._polled_at is None else counts.at - self._polled_at
        self._polled_at = counts.at
        idle = counts.in_flight == 0
        self._equations *= exp(-elapsed / (_IDLE_MEMORY_S if idle else _MEMORY_S))
        if idle:
            self._recent = self._recent.times(exp(-elapsed / _IDLE_REACTION_S))
        stretches = [
            self._bounded(work, fleet) if 0.0 < counts.steps < _WARM_UP_STEPS else work
            for work in self._windows.poll(counts)
        ]
        if any(self._expected(work, _SAME) > _WRONG_COUNTER * work.seconds for work in stretches):
            self._windows.interrupted()
        elif stretches:
            latest, *windows = stretches
            keep = exp(-latest.seconds / _REACTION_S)
            self._recent = self._recent.times(keep).plus(latest)
            for work in windows:
                self._learn(work)
        self._solve(fleet)

    def interrupted(self) -> None:
        """Notes a failed poll. The engine may have hung, so nothing is learned from the time until
        the next poll."""
        self._windows.interrupted()

    @property
    def _scale(self) -> float:
        expected = max(self._expected(self._recent, self._solution), 0.0)
        scale = (self._recent.seconds + _PRIOR_S) / (expected + _PRIOR_S)
        return min(max(scale, 1 / _MOST_SCALE), _MOST_SCALE)

    def _expected(self, work: Work, solution: Sequence[float]) -> float:
        """Seconds that the work takes by the coefficients ``solution``."""
        return float(sum(map(mul, map(mul, solution, self._unit), work.terms)))

    def _bounded(self, work: Work, fleet: Prior) -> Work:
        most = _WARM_UP_SLOWER * self._expected(work, fleet.coefficients)
        return Work(min(work.seconds, most), work.terms)

    def _learn(self, work: Work) -> None:
        ratio = self._expected(work, self._solution) / work.seconds if work.seconds else 0.0
        if ratio <= 0.0:
            return
        weight = work.seconds / SECONDS[-1] * min(ratio, 1.0 / ratio) ** 2
        row = np.array([*map(mul, work.terms, self._unit), work.seconds]) / work.seconds
        self._equations += weight * np.outer(row[:4], row)

    def _solve(self, fleet: Prior) -> None:
        p = np.array(fleet.coefficients)
        fitted = p @ self._equations
        factor = (fitted[-1] + fleet.weight) / (fitted[:-1] @ p + fleet.weight)
        centers = (p * factor).tolist()
        descend(self._equations, [_PROPORTIONS] * 4, centers, self._solution)


class FleetPrior:
    """Coefficients p expected of a replica before its first work, learned from measured replicas.

    A replica's slowness is the factor by which it is slower than its profile. All replicas of the
    poller may be equally slow, for example if no profile is configured and the default is wrong. So
    p is the median slowness, which no outlier changes, times the proportions of the coefficients of
    measured replicas. Replicas not measured yet count with slowness 1, because fast replicas are
    measured first and would make all look fast. If three or more are measured and their median
    exceeds 1, the others count with this median: otherwise they would look fast and get too many
    requests.
    """

    def __init__(self) -> None:
        self._evidence: dict[str, Floats | None] = {}
        self._solution = list(_SAME)
        self._reports = 0
        self.prior = PROFILE_PRIOR

    def report(self, replica: str, evidence: Floats | None) -> None:
        """Stores a replica's :attr:`Estimator.evidence`, and computes the prior anew once all
        replicas have reported again."""
        self._evidence[replica] = evidence
        self._reports += 1
        if self._reports >= len(self._evidence):
            self._reports = 0
            self.prior = self._renewed()

    def forget(self, replica: str) -> None:
        """Drops a replica that this poller no longer scrapes."""
        self._evidence.pop(replica, None)

    def _renewed(self) -> Prior:
        measured = [evidence for evidence in self._evidence.values() if evidence is not None]
        if not measured:
            return PROFILE_PRIOR
        slowness = [_slowness(evidence) for evidence in measured]
        assumed = max(_median(slowness), 1.0) if len(measured) > 2 else 1.0
        median = _median(slowness + [assumed] * (len(self._evidence) - len(measured)))
        # Evidence scaled to slowness 1, so that only proportions remain.
        scaled = [
            evidence * ([g**2] * 4 + [g]) for evidence, g in zip(measured, slowness, strict=True)
        ]
        descend(np.sum(scaled, axis=0), [_FLEET_PROPORTIONS] * 4, _SAME, self._solution)
        spread = mean(log(g / median) ** 2 for g in slowness)
        weight = _NOISE / (spread + _EVEN) if len(slowness) > 2 else _SMALL_FLEET
        return Prior(tuple(median * proportion for proportion in self._solution), weight)


def _median(slowness: Sequence[float]) -> float:
    """Returns the median; of two middle values, the one nearer to 1."""
    return min(median_low(slowness), median_high(slowness), key=lambda g: abs(log(g)))


def _slowness(evidence: Floats) -> float:
    """Slowness g of the replica: actual seconds of its work ÷ seconds expected by its profile."""
    *expected, actual = map(float, evidence.sum(axis=0))
    return max(actual / sum(expected), 1.0 / _WRONG_COUNTER)


def coefficients(model: StepModel) -> Terms:
    """Coefficients of a step-time model in the order of the terms: seconds per unit."""
    return model.c0, model.c_prefill, model.c_batch, model.c_kv


def descend(
    equations: Floats, weights: Sequence[float], centers: Sequence[float], solution: list[float]
) -> None:
    """Improves a non-negative least squares solution in place, by coordinate descent.

    Args:
        equations: normal equations, with the right side as the last column.
        weights: weight of each coefficient's prior.
        centers: prior of each coefficient.
        solution: the coefficients, which stay at or above zero.
    """
    rows, pulls = equations.tolist(), list(map(mul, weights, centers))
    for _ in range(_ROUNDS):
        for k, row in enumerate(rows):
            missing = row[-1] + pulls[k] - sum(map(mul, row, solution)) - weights[k] * solution[k]
            better = solution[k] + missing / (row[k] + weights[k])
            solution[k] = better if better > 0.0 else 0.0
