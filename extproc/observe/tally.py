"""Counters and histograms for what happens several times a request.

Those of prometheus_client lock and look their labels up each time, which was a twentieth of a
router's CPU. These count in one thread and are brought into its families when they are asked for.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class Counts(Collector):
    """A counter for each combination of labels that was seen."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._counts: Counter[tuple[str, ...]] = Counter()
        registry.register(self)

    def add(self, *labels: str) -> None:
        """Counts one."""
        self._counts[labels] += 1

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
    """A histogram without labels."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """``bounds``: upper ends of all buckets but the last, rising."""
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        ends = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, self._sum)
