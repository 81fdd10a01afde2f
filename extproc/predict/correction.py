"""How much longer requests decode than predicted."""

from math import exp

_MEMORY = 30.0
"""Seconds in which what was seen loses two thirds of its weight."""
_DOUBT = 5.0
"""Seconds of decoding that count for the prediction as it is."""
_LEAST, _MOST = 0.5, 3.0


class Correction:
    """Actual ÷ predicted decode time of one replica, as of late.

    A prediction knows the requests in flight, and not those that come later: their prefill and
    their place in the batch prolong it by 40% where a fleet is well used. Nor does the step-time
    model see everything. Both show in the same ratio. With it the median error of the completion,
    lengths known, is 8% instead of 27%: of the first 4,000 requests of the conversation trace at
    1.5 times its speed on eight equal replicas, by ``python -m benchmarks.simulate --trace
    benchmarks/traces/azure-2023-conv.jsonl.gz --fleet benchmarks/fleets/equal.yaml --speed 1.5
    --know lengths --requests 4000``, as it is and with :meth:`ratio` always 1.
    """

    __slots__ = ("_actual", "_at", "_predicted")

    def __init__(self, now: float) -> None:
        self._actual = 0.0
        self._predicted = 0.0
        self._at = now

    def observe(self, predicted: float, actual: float, now: float) -> None:
        """A request decoded in ``actual`` seconds."""
        self._fade(now)
        self._actual += min(actual, _MOST * predicted)
        self._predicted += predicted

    def ratio(self, now: float) -> float:
        """Actual ÷ predicted as of now; it fades to 1 where nothing ends.

        One that does not fade would keep requests away for ever, and with them all that could
        prove it wrong.
        """
        self._fade(now)
        ratio = (self._actual + _DOUBT) / (self._predicted + _DOUBT)
        return min(max(ratio, _LEAST), _MOST)

    def _fade(self, now: float) -> None:
        keep = exp((self._at - now) / _MEMORY)
        self._at = now
        self._actual *= keep
        self._predicted *= keep
