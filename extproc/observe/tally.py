"""Counters and histograms for what happens several times a request.

Those of prometheus_client lock and look their labels up each time, which was a twentieth of a
router's CPU. These count in one thread and are brought into its families when they are asked for.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

OTHER = "other"  # the label of all that have no series of their own
_MOST = 20  # a page of them all takes 10 ms, in which no request is looked at


class Counts(Collector):
    """A counter for each combination of labels that was seen."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._counts: defaultdict[tuple[str, ...], float] = defaultdict(int)
        registry.register(self)

    def add(self, *labels: str, by: float = 1) -> None:
        """Counts one, or so many."""
        self._counts[labels] += by

    def keep(self, label: str, values: Container[str]) -> None:
        """Forgets the combinations in which the label has none of these values."""
        at = self._labels.index(label)
        for gone in [labels for labels in self._counts if labels[at] not in values]:
            del self._counts[gone]

    def collect(self) -> Iterator[CounterMetricFamily]:
        """For the registry."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Spread(Collector):
    """A histogram for each combination of labels that was seen, or one without labels.

    Of the combinations the first ``_MOST`` have one of their own, and all others are one together:
    clients name models, and each histogram is a dozen series.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        labels: Sequence[str] = (),
    ) -> None:
        """``bounds``: upper ends of all buckets but the last, rising."""
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        self._labels = labels
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        if not labels:
            self._enter(())
        registry.register(self)

    def observe(self, value: float, *labels: str) -> None:
        """Counts a value."""
        if labels not in self._counts:
            labels = self._enter(labels)
        self._counts[labels][bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def _enter(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """The combination as which it is counted."""
        entered = labels if len(self._counts) < _MOST else (OTHER,) * len(labels)
        self._counts.setdefault(entered, [0] * (len(self._bounds) + 1))
        return entered

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        ends = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            buckets = list(zip(ends, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family
