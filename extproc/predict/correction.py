"""How much longer requests decode than predicted."""

from math import exp, inf

import numpy as np

from extproc.predict.inputs import Floats

_MEMORY = 30.0
"""Seconds in which what was seen loses two thirds of its weight."""
_DOUBT = 5.0
"""Seconds of decoding that count for the prediction as it is."""
_LEAST, _MOST = 0.5, 3.0
_OTHERS = 1.25
"""Step times that differ by more than that are others; by less, they waver."""
_EVERY = 0.2
"""Seconds between two looks at what has faded."""


class Corrections:
    """Actual ÷ predicted decode time of each replica, as of late.

    A prediction knows the requests in flight, and not those that come later: their prefill and
    their place in the batch prolong it by 40% where a fleet is well used. Nor does the step-time
    model see everything. Both show in the same ratio. With it the median error of the completion,
    lengths known, is 8% instead of 27%: of the first 4,000 requests of the conversation trace at
    1.5 times its speed on eight equal replicas, by ``python -m benchmarks.simulate --trace
    benchmarks/traces/azure-2023-conv.jsonl.gz --fleet benchmarks/fleets/equal.yaml --speed 1.5
    --know lengths --requests 4000``, as it is and with all ratios 1.
    """

    def __init__(self, now: float) -> None:
        self._sums: Floats = np.zeros((3, 0))
        """Seconds of decoding, a column a replica: actual, as predicted, and as would be predicted
        by what is known of the step times now."""
        self._at = now
        self._told_at = -inf

    def clear(self, row: int) -> None:
        """Another replica has that row from now on, perhaps a new row."""
        missing = row + 1 - self._sums.shape[1]
        if missing > 0:
            self._sums = np.pad(self._sums, ((0, 0), (0, missing)))
        self._sums[:, row] = 0.0
        self._told_at = -inf

    def observe(
        self, row: int, predicted: float, actual: float, now: float, slower: float = 1.0
    ) -> None:
        """A request decoded in ``actual`` seconds; steps there are known to take ``slower`` times
        as long as when it was predicted."""
        self._fade(now)
        known = predicted * slower
        self._sums[:, row] += min(actual, _MOST * known), predicted, known
        self._told_at = -inf

    def slowed(self, row: int, factor: float) -> None:
        """Steps there are known to take ``factor`` times as long as was thought until now."""
        if factor != 1.0:
            self._sums[2, row] *= factor
            self._told_at = -inf

    def sums(self, now: float) -> Floats:
        """Seconds of decoding as of late, actual and predicted, a column a replica.

        Where step times are others now, it is as predicted or as would be now, whatever is nearer
        to the actual ones: step times that were wrong are not corrected once more when they are put
        right, and a replica that was predicted well and is throttled now has no correction that
        says it is as fast as before.
        """
        self._fade(now)
        actual, then, known = self._sums
        least, most = np.minimum(then, known), np.maximum(then, known)
        others = most > _OTHERS * least
        return np.array([actual, np.where(others, np.clip(actual, least, most), then)])

    def due(self, now: float) -> bool:
        """Whether the ratios may be others than when they were last told."""
        return now - self._told_at >= _EVERY

    def ratios(self, now: float, others: Floats | float = 0.0) -> Floats:
        """Actual ÷ predicted of each row as of now.

        ``others``: :meth:`sums` of other routers, added up. One of four sees a quarter of the ends;
        on that alone its predictions would be less sure, and the slowest requests 9% slower.

        A ratio fades to 1 where nothing ends: one that does not would keep requests away for ever,
        and with them all that could prove it wrong.
        """
        self._told_at = now
        actual, predicted = self.sums(now) + others + _DOUBT
        ratios: Floats = np.clip(actual / predicted, _LEAST, _MOST)
        return ratios

    def _fade(self, now: float) -> None:
        self._sums *= exp((self._at - now) / _MEMORY)
        self._at = now
