"""How far predictions err, learned from the requests that ended."""

from math import exp, inf, log

import numpy as np

from extproc.predict.estimator import descend
from extproc.predict.inputs import Floats

_MEMORY = 30.0  # seconds in which what was seen loses two thirds of its weight
_DOUBT = 5.0  # seconds of decoding that count for the prediction as it is
_LEAST, _MOST = 0.5, 3.0
_OTHERS = 1.25  # step times that differ by more than that are others; by less, they waver
_EVERY = 0.2  # seconds between two looks at what has faded


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


_REQUEST_S, _TOKEN_S = 0.01, 1e-5
"""Units, about what it is: seconds for each request, and for each token of its prompt."""
_KEEP = 0.99  # weight that older first tokens keep with each new one: the last 100 count
_KNOWN = 0.02  # weight of there being nothing: a few first tokens say otherwise
_MOST_STEPS, _MOST_REQUEST_S, _MOST_TOKEN_S = 3.0, 0.05, 2e-5
"""More is not believed: it would be something else that they waited for."""


class FirstTokens:
    """Seconds that first tokens come later than by the engine's steps: ``x·step + y + z·prompt``.

    An engine that schedules ahead takes a request a step later; HTTP, the tokenizer and the way to
    the engine take their time for each request and for each token of its prompt, cached or not. No
    counter tells. All replicas of a fleet run the same program, so that each first token that a
    router sees tells of all. Non-negative least squares on relative errors; on an H100 with a 7B
    model it is 13 ms and 4 µs for each token of the prompt (docs/real-vllm.md).
    """

    def __init__(self) -> None:
        self._equations = np.zeros((3, 4))
        self._solution = [0.0, 0.0, 0.0]

    def observe(self, step: float, prompt: float, steps_s: float, actual: float) -> None:
        """A first token came.

        Args:
            step: seconds of a step on its replica, with what decoded there.
            prompt: tokens.
            steps_s: seconds until it, by the engine's steps.
            actual: seconds until it.
        """
        if not 0.0 <= steps_s < inf or actual <= 0.0:
            return
        late = max(actual - steps_s, -actual)
        row = np.array([step, _REQUEST_S, prompt * _TOKEN_S, late]) / actual
        self._equations = self._equations * _KEEP + np.outer(row[:3], row)
        descend(self._equations, [_KNOWN] * 3, [0.0] * 3, self._solution)

    @property
    def outside_steps(self) -> tuple[float, float, float]:
        """Seconds for each second of a step, for each request, and for each token of its prompt."""
        each_step, request, token = self._solution
        return (
            min(each_step, _MOST_STEPS),
            min(request * _REQUEST_S, _MOST_REQUEST_S),
            min(token * _TOKEN_S, _MOST_TOKEN_S),
        )


_ASKED = 0.9  # share of the requests that are to take no longer
_STEP = 0.03  # of the logarithm, for each request: it follows the last hundred or so


class ErrorQuantile:
    """Actual ÷ predicted of a time: the quantile ``_ASKED`` of those seen.

    By stochastic approximation (Robbins and Monro, 1951): each that exceeds it moves it up, and
    each that does not a ninth as far down.
    """

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def ratio(self) -> float:
        return exp(self._log)

    def observe(self, predicted: float, actual: float) -> None:
        if 0.0 < predicted < inf and actual > 0.0:
            exceeds = log(actual / predicted) > self._log
            self._log += _STEP * (exceeds - 1.0 + _ASKED)


class ErrorQuantiles:
    """Error quantiles of the times that have targets: first token, time per token, completion."""

    def __init__(self) -> None:
        self.ttft = ErrorQuantile()
        self.tpot = ErrorQuantile()
        self.completion = ErrorQuantile()
