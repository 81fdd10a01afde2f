"""Recent figures of a router: of the last minute, ten minutes and hour, and fading averages."""

from collections import deque
from collections.abc import Container, Sequence
from math import exp

import numpy as np

from extproc.ground.clock import Clock
from extproc.observe.metrics import Counts, RouterMetrics
from extproc.predict.inputs import Floats

SPANS_S = {"minute": 60.0, "10 minutes": 600.0, "hour": 3600.0}
RATES = "Requests/s", "5xx/s", "429/s"

_QUANTILES = {"p50": 0.5, "p99": 0.99}
_EVERY_S = 10.0
_FADES_S = 30.0  # time in which the weight of a value in an average falls by a factor e
_GAP_S = 2.0  # longer gaps between two values count as this long: the process stood still
_ENDED_IN = {"unanswered", "lost"}  # results of requests that were counted as routed before
_TOO_MANY = {"saturated", "too_late", "waited_too_long", "too_many_waiting"}  # answered with 429
_UNAVAILABLE = {"service_unavailable_error", "no_memory"}  # answered with 503


class History:
    """Totals of the metrics, stored every ten seconds; two totals yield the figures of a period."""

    def __init__(self, metrics: RouterMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._times = {"TTFT": metrics.ttft, "TPOT": metrics.tpot, "Completion": metrics.completion}
        most = round(SPANS_S["hour"] / _EVERY_S) + 1
        self._totals = deque([(clock(), self._now())], maxlen=most)

    @property
    def age_s(self) -> float:
        """Seconds since the start of the router, exact for the first hour."""
        return self._clock() - self._totals[0][0]

    def look(self) -> None:
        """Store the totals, if the last totals are at least ten seconds old."""
        now = self._clock()
        if now - self._totals[-1][0] >= _EVERY_S:
            self._totals.append((now, self._now()))

    def figures(self) -> dict[str, list[float]]:
        """Return figures by title, each for the periods of :data:`SPANS_S` until now. A period may
        be up to ten seconds shorter, and begins at the start of the router at the earliest.

        The :data:`RATES` come first; 5xx includes the router's 503, and requests lost on hung
        replicas. Then come quantiles of times in seconds; NaN: no such time is known.
        """
        now, totals = self._clock(), self._now()
        periods = [self._of_period(span, now, totals) for span in SPANS_S.values()]
        return {title: [period[title] for period in periods] for title in periods[0]}

    def _of_period(self, span: float, now: float, totals: Sequence[Floats]) -> dict[str, float]:
        within = (each for each in self._totals if now - each[0] <= span)
        at, before = next(within, self._totals[-1])
        counts, *buckets = (new - old for new, old in zip(totals, before, strict=True))
        rates = counts / max(now - at, 1.0)
        return dict(zip(RATES, rates.tolist(), strict=True)) | {
            f"{name} {which}": quantile(seconds.bounds, values, q)
            for (name, seconds), values in zip(self._times.items(), buckets, strict=True)
            for which, q in _QUANTILES.items()
        }

    def _now(self) -> tuple[Floats, ...]:
        metrics = self._metrics
        counts = (
            sum(count for (name,), count in metrics.requests.items() if name not in _ENDED_IN),
            _sum(metrics.responses, {"5xx"})
            + _sum(metrics.refused, _UNAVAILABLE)
            + _sum(metrics.requests, {"lost"}),
            _sum(metrics.refused, _TOO_MANY),
        )
        return tuple(
            map(np.array, (counts, *(seconds.totals() for seconds in self._times.values())))
        )


def _sum(counts: Counts, labels: Container[str]) -> float:
    return sum(count for (label,), count in counts.items() if label in labels)


def quantile(bounds: Sequence[float], counts: Floats, q: float) -> float:
    """Return a quantile of a histogram, interpolated within its bucket; NaN for no values.

    ``counts``: number of values up to each of ``bounds``, and last the number of all values.
    """
    if not (total := counts[-1]):
        return float("nan")
    return float(np.interp(q * total, [0.0, *counts], [0.0, *bounds, bounds[-1]]))


class Average:
    """Mean of a figure over time, in which older values fade: after 30 s they count 1/e."""

    def __init__(self, clock: Clock) -> None:
        self.value = 0.0
        self._clock = clock
        self._at = clock()

    def add(self, value: float) -> None:
        """Add the value that the figure had during the time since the last call."""
        now = self._clock()
        faded = exp(-min(now - self._at, _GAP_S) / _FADES_S)
        self.value = faded * self.value + (1.0 - faded) * value
        self._at = now


class Delays:
    """Delays of the router's event loop and of its Redis, and Redis's refusal to store."""

    def __init__(self, clock: Clock) -> None:
        self.loop_delay_s = Average(clock)  # lateness of the event loop's timers, at most 1 s
        self.redis_s = Average(clock)  # round trip of a digest
        self.redis_refusal = ""  # why Redis stores nothing; empty if Redis stores
