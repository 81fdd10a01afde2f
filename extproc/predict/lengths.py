"""How many tokens a request will generate, learned from the ones that ended."""

from bisect import bisect_left

import numpy as np
from numpy.typing import ArrayLike, NDArray

from extproc.request.profile import Endpoint

Floats = NDArray[np.float64]

_PER_DOUBLING = 4
_LENGTHS: Floats = 2.0 ** (np.arange(17 * _PER_DOUBLING + 1) / _PER_DOUBLING)
"""Representative output lengths, in tokens: four to a doubling, 1 to 131,072."""
_LENGTHS_LIST: list[float] = _LENGTHS.tolist()

_PRIOR_MEDIAN = 128.0
_PRIOR_SPREAD = 1.2
"""Log-normal to start from, wide enough for chat and code alike; it is outweighed after a dozen
observations."""
_PRIOR_WEIGHT = 4.0
_DECAY = 0.998
"""Each observation takes this much from the older ones: a memory of about 500 requests."""
_MOST_ROWS = 512
"""Distinct (model, endpoint) pairs told apart; later ones share the row of all."""


def _prior() -> Floats:
    density = np.exp(-0.5 * (np.log(_LENGTHS / _PRIOR_MEDIAN) / _PRIOR_SPREAD) ** 2)
    weights: Floats = _PRIOR_WEIGHT * density / density.sum()
    return weights


class OutputLengths:
    """Decaying histogram of output lengths per model and endpoint.

    What remains of a request follows from its progress, not from an estimate made at its start:
    ``E[min(L, bound) − g | L > g]`` after ``g`` tokens. Suffix sums of the histogram make that a
    constant-time look-up, for one request or for all in flight at once.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[str, Endpoint], int] = {}
        self._weights = _prior()[None, :].copy()
        self._count = np.zeros((1, len(_LENGTHS) + 1))
        self._tokens = np.zeros((1, len(_LENGTHS) + 1))
        self._sum_up(0)

    def row(self, model: str, endpoint: Endpoint) -> int:
        """The histogram of that model and endpoint; 0, that of all, before any of it ended."""
        return self._rows.get((model, endpoint), 0)

    def observe(self, model: str, endpoint: Endpoint, tokens: float, bound: float) -> None:
        """A sequence ended after ``tokens`` tokens, of ``bound`` that it was allowed.

        One that was cut by its bound would have gone on: it counts for the lengths beyond, as they
        are distributed among themselves.
        """
        for row in {0, self._row_to_learn(model, endpoint)}:
            weights = self._weights[row]
            weights *= _DECAY
            if tokens < bound:
                weights[_bucket(tokens)] += 1.0
            else:
                beyond = weights[_bucket(tokens) :]
                beyond *= 1.0 + 1.0 / max(float(beyond.sum()), 1.0)
            self._sum_up(row)

    def _row_to_learn(self, model: str, endpoint: Endpoint) -> int:
        """The row of that model and endpoint; a new one starts from what all have shown."""
        row = self.row(model, endpoint)
        if row or len(self._weights) > _MOST_ROWS:
            return row
        row = self._rows[model, endpoint] = len(self._weights)
        start = self._weights[0] * (_PRIOR_WEIGHT / self._weights[0].sum())
        self._weights = np.vstack([self._weights, start])
        self._count = np.vstack([self._count, np.zeros_like(self._count[0])])
        self._tokens = np.vstack([self._tokens, np.zeros_like(self._tokens[0])])
        return row

    def expected(self, row: int, bound: float) -> float:
        """:meth:`remaining` of one sequence that has no token yet, without the cost of numpy."""
        clipped = bisect_left(_LENGTHS_LIST, bound)
        count, tokens = self._count[row], self._tokens[row]
        total = float(tokens[0] - tokens[clipped]) + bound * float(count[clipped])
        return min(max(total / float(count[0]), 1.0), max(bound, 0.0))

    def remaining(self, rows: ArrayLike, progress: ArrayLike, bound: ArrayLike) -> Floats:
        """Tokens still to come, given those generated and the bound; at least 1 below the bound.

        Arguments broadcast. Beyond every length seen, half the progress is expected to follow.
        """
        row = np.asarray(rows, dtype=np.intp)
        done = np.asarray(progress, dtype=np.float64)
        most = np.asarray(bound, dtype=np.float64)
        alive = np.searchsorted(_LENGTHS, done, side="right")
        clipped = np.maximum(np.searchsorted(_LENGTHS, most), alive)
        survivors = self._count[row, alive]
        total = (
            self._tokens[row, alive] - self._tokens[row, clipped] + most * self._count[row, clipped]
        )
        known = survivors > 1e-9
        expected = np.where(known, total / np.where(known, survivors, 1.0) - done, done * 0.5)
        left: Floats = np.minimum(np.maximum(expected, 1.0), np.maximum(most - done, 0.0))
        return left

    def _sum_up(self, row: int) -> None:
        weights = self._weights[row]
        self._count[row, :-1] = np.cumsum(weights[::-1])[::-1]
        self._tokens[row, :-1] = np.cumsum((weights * _LENGTHS)[::-1])[::-1]


def _bucket(tokens: float) -> int:
    """The length nearest to ``tokens``, in doublings."""
    bucket = bisect_left(_LENGTHS_LIST, tokens * 2 ** (-0.5 / _PER_DOUBLING))
    return min(bucket, len(_LENGTHS_LIST) - 1)
