"""How much of what a replica should have in its prefix cache it really has."""

import numpy as np

from extproc.predict.inputs import Floats, Indices

DEPTHS = 4
"""Parts of a cache that are told apart, from what was used last to what is evicted next."""
_PRIOR_TOKENS = 2_000.0
"""Tokens' worth of evidence that all of it is there."""
_SURE = 0.98
"""Reported ÷ expected from which on nothing is doubted."""
_MOST = 2.0
"""Reported ÷ expected, at most: who finds more than was expected is not believed blindly later."""
_MEMORY_TOKENS = 50_000.0
"""Expected tokens after which older reports weigh 1/e as much."""


class Belief:
    """Reported ÷ expected hits of each replica, by how much was sent there since.

    What others send, a cache that is smaller than it seems, or none at all: whatever the reason,
    what was used long ago is gone first.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((2, 0, DEPTHS))
        """Reported and expected tokens, by row and depth."""
        self.doubted = np.zeros(0, np.bool_)
        """By row: whether less was found than expected at any depth, so that depth matters."""

    def reset(self, row: int) -> None:
        """The replica in that row is believed to hold all, until it reports something else."""
        missing = row + 1 - self._sums.shape[1]
        if missing > 0:
            self._sums = np.pad(self._sums, ((0, 0), (0, missing), (0, 0)))
            self.doubted = np.pad(self.doubted, (0, missing))
        self._sums[:, row] = _PRIOR_TOKENS
        self.doubted[row] = False

    def observe(self, row: int, expected: Floats, reported: float) -> None:
        """The replica in that row found ``reported`` tokens, where so many of each depth were
        expected."""
        total = float(expected.sum())
        if total <= 0.0:
            return
        keep = 1.0 / (1.0 + expected / _MEMORY_TOKENS)
        share = min(reported / total, _MOST)
        self._sums[:, row] = self._sums[:, row] * keep + (expected * share, expected)
        reported, expected = self._sums[:, row]
        self.doubted[row] = bool((reported < expected * _SURE).any())

    def share(self, rows: Indices, depths: Indices) -> Floats:
        """Of what is expected at these depths on the replicas in these rows, what is there."""
        reported, expected = self._sums[:, rows, depths]
        share: Floats = np.minimum(reported / expected, 1.0)
        return share
