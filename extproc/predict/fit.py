"""Non-negative least squares on relative errors, small enough to be solved at every poll."""

from collections.abc import Sequence
from operator import mul

import numpy as np

from extproc.predict.inputs import Floats
from extproc.predict.step import StepModel
from extproc.predict.windows import Terms, Work

_ROUNDS = 4
"""Of coordinate descent each time; it starts from the last solution."""


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
    """Improves a solution in place.

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
