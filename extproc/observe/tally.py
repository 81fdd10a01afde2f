"""Counters and histograms for events that happen several times per request.

Not thread-safe. ``add`` takes 0.17 µs and ``observe`` 0.33 µs of CPU. The classes of
prometheus_client would take 0.47 and 0.92 µs, because they lock and write ``_created`` series.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, ItemsView, Iterator, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

OTHER = "other"  # label of the series in which all further values count together
_MOST = 20  # label combinations of a histogram; writing 20 to the page stops the router for 10 ms


class Counts(Collector):
    """Counter for each combination of labels."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._family = partial(CounterMetricFamily, name, documentation, labels=labels)
        self._labels = labels
        self._counts: defaultdict[tuple[str, ...], float] = defaultdict(int)
        registry.register(self)

    def add(self, *labels: str, by: float = 1) -> None:
        self._counts[labels] += by

    def items(self) -> ItemsView[tuple[str, ...], float]:
        return self._counts.items()

    def keep(self, label: str, values: Container[str]) -> None:
        """Drop the combinations in which the value of ``label`` is not among ``values``."""
        at = self._labels.index(label)
        for dropped in [labels for labels in self._counts if labels[at] not in values]:
            del self._counts[dropped]

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = self._family()
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Spread(Collector):
    """Histogram for each of the first 20 combinations of labels, and for all others together.

    Each combination has a dozen series. The limit is needed because clients choose model names.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        labels: Sequence[str] = (),
    ) -> None:
        """``bounds``: ascending upper bounds of all buckets except the last."""
        self._family = partial(HistogramMetricFamily, name, documentation, labels=labels)
        self.bounds = bounds
        self._labels = labels
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        if not labels:
            self._enter(())
        registry.register(self)

    def observe(self, value: float, *labels: str) -> None:
        if labels not in self._counts:
            labels = self._enter(labels)
        self._counts[labels][bisect_left(self.bounds, value)] += 1
        self._sums[labels] += value

    def totals(self) -> list[int]:
        """Return the number of values in each bucket, added up over all labels."""
        buckets = zip(*self._counts.values(), strict=True)
        return [sum(counts) for counts in buckets] or [0] * (len(self.bounds) + 1)

    def _enter(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        entered = labels if len(self._counts) < _MOST else (OTHER,) * len(labels)
        self._counts.setdefault(entered, [0] * (len(self.bounds) + 1))
        return entered

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = self._family()
        ends = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for labels, counts in self._counts.items():
            buckets = list(zip(ends, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family
