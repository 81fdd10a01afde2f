"""Prediction errors, learned from requests that have ended."""

from dataclasses import dataclass
from math import exp, inf

import numpy as np

from extproc.predict.estimator import descend
from extproc.predict.inputs import Floats

_MEMORY_S = 30.0  # time in which the weight of a request falls by a factor e
_PRIOR_S = 5.0  # seconds of decoding with the ratio 1, added to the observed seconds
_LEAST, _MOST = 0.5, 3.0  # bounds of the ratios
_CHANGED = 1.25  # larger ÷ smaller of old and new step times; a smaller ratio counts as noise
_REFRESH_S = 0.2  # time after which ratios are computed anew, because old requests fade


class Corrections:
    """Actual ÷ predicted decode time of each replica, over its recent requests.

    A prediction counts the requests in flight, but not later arrivals: their prefill and their
    place in the batch prolong decoding by 40% in a well used fleet. The step-time model has errors,
    too. The ratio corrects both. With known output lengths it reduces the median error of the
    completion from 27% to 8%, measured with and without the ratio by ``python -m
    benchmarks.simulate --trace benchmarks/traces/azure-2023-conv.jsonl.gz --fleet
    benchmarks/fleets/equal.yaml --speed 1.5 --know lengths --requests 4000``: the first 4,000
    requests of the conversation trace, 1.5 times as fast, on eight equal replicas.
    """

    def __init__(self, now: float) -> None:
        self._sums: Floats = np.zeros((3, 0))
        """Seconds of decoding, a column for each replica: actual, as predicted, and as the present
        step times would predict."""
        self._at = now
        self._computed_at = -inf

    def clear(self, row: int) -> None:
        missing = max(row + 1 - self._sums.shape[1], 0)
        self._sums = np.pad(self._sums, ((0, 0), (0, missing)))
        self._sums[:, row] = 0.0
        self._computed_at = -inf

    def observe(
        self, row: int, predicted: float, actual: float, now: float, slower: float = 1.0
    ) -> None:
        """Adds a request that decoded in ``actual`` seconds.

        ``slower``: present step time of the replica ÷ its step time in the prediction.
        """
        self._fade(now)
        present = predicted * slower
        self._sums[:, row] += min(actual, _MOST * present), predicted, present
        self._computed_at = -inf

    def slowed(self, row: int, factor: float) -> None:
        """Multiplies the predicted decode times of a replica's past requests by ``factor``, as its
        estimated step times were multiplied."""
        self._sums[2, row] *= factor
        self._computed_at = -inf

    def sums(self, now: float) -> Floats:
        """Returns the recent seconds of decoding, actual in the first row and predicted in the
        second, with a column for each replica.

        If step times have changed since the predictions, the predicted seconds are the actual ones,
        clipped to the range between the old and the present prediction. So an error that the
        estimator has corrected meanwhile is not corrected twice, and requests from before a replica
        was throttled do not make the replica look fast.
        """
        self._fade(now)
        actual, then, present = self._sums
        least, most = np.minimum(then, present), np.maximum(then, present)
        changed = most > _CHANGED * least
        return np.array([actual, np.where(changed, np.clip(actual, least, most), then)])

    def due(self, now: float) -> bool:
        return now - self._computed_at >= _REFRESH_S

    def ratios(self, now: float, others: Floats | float = 0.0) -> Floats:
        """Returns actual ÷ predicted decode time of each row.

        ``others``: sum of the other routers' :meth:`sums`. In simulation with four routers and
        equal replicas, requests take 0.4% longer without ``others``: each router sees only a
        quarter of the requests.

        The ratio of a replica on which no request ends fades to 1: otherwise a high ratio would
        keep requests away for ever, and no request could prove the ratio wrong.
        """
        self._computed_at = now
        actual, predicted = self.sums(now) + others + _PRIOR_S
        ratios: Floats = np.clip(actual / predicted, _LEAST, _MOST)
        return ratios

    def _fade(self, now: float) -> None:
        self._sums *= exp((self._at - now) / _MEMORY_S)
        self._at = now


_REQUEST_S, _TOKEN_S = 0.01, 1e-5
"""Units of y and z in :class:`FirstTokens`, near their usual values: seconds per request and per
prompt token."""
_DECAY = 0.99  # weight of older first tokens after each new one: a memory of about 100
_PRIOR_WEIGHT = 0.02  # of the prior, coefficients of zero; a few first tokens outweigh it
_MOST_STEPS, _MOST_REQUEST_S, _MOST_TOKEN_S = 3.0, 0.05, 2e-5
"""Bounds of the coefficients: a longer delay has another cause."""


class FirstTokens:
    """Delay of first tokens beyond the engine's steps: ``x·step + y + z·prompt``.

    An engine that schedules ahead begins a new request one step later. HTTP, the tokenizer and the
    transport to the engine take time for each request and for each prompt token, cached or not. No
    counter of vLLM shows these times. All replicas of a fleet run the same program, so the delay is
    learned from the first tokens of all replicas together, by non-negative least squares on
    relative errors. An H100 with a 7B model has y = 13 ms and z = 4 µs (docs/real-vllm.md).
    """

    def __init__(self) -> None:
        self._equations = np.zeros((3, 4))
        self._solution = [0.0, 0.0, 0.0]
        self.outside_steps = 0.0, 0.0, 0.0
        """Coefficients x, y and z: seconds of delay for each second of a step, for each request,
        and for each prompt token."""

    def observe(self, step: float, prompt: float, steps_s: float, actual: float) -> None:
        """Learns from one first token, which came ``actual`` seconds after the decision.

        ``step``: seconds of a decode step on the replica, with the batch at the decision.
        ``prompt``: tokens. ``steps_s``: predicted seconds, by the engine's steps alone.
        """
        if not 0.0 <= steps_s < inf or actual <= 0.0:
            return
        late = max(actual - steps_s, -actual)
        row = np.array([step, _REQUEST_S, prompt * _TOKEN_S, late]) / actual
        self._equations = self._equations * _DECAY + np.outer(row[:3], row)
        descend(self._equations, [_PRIOR_WEIGHT] * 3, [0.0] * 3, self._solution)
        each_step, request, token = self._solution
        self.outside_steps = (
            min(each_step, _MOST_STEPS),
            min(request * _REQUEST_S, _MOST_REQUEST_S),
            min(token * _TOKEN_S, _MOST_TOKEN_S),
        )


_QUANTILE = 0.9
_STEP = 0.03  # of the ratio's logarithm for each request: a memory of about 100 requests


@dataclass(slots=True)
class ErrorQuantile:
    """Ratio of actual to predicted time that nine of ten requests do not exceed.

    Learned by stochastic approximation (Robbins and Monro, 1951): each request that exceeds the
    ratio raises it, and each other request lowers it by a ninth of that step.
    """

    ratio: float = 1.0

    def observe(self, predicted: float, actual: float) -> None:
        if 0.0 < predicted < inf and actual > 0.0:
            exceeds = actual / predicted > self.ratio
            self.ratio *= exp(_STEP * (exceeds - 1.0 + _QUANTILE))


class ErrorQuantiles:
    """Error quantile of each time that can have a target: first token, token, completion."""

    def __init__(self) -> None:
        self.ttft = ErrorQuantile()
        self.tpot = ErrorQuantile()
        self.completion = ErrorQuantile()
