"""The router's own counters and histograms show what prometheus_client's would."""

from random import Random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from extproc.observe.tally import Counts, Spread


def page(registry: CollectorRegistry) -> list[str]:
    """What Prometheus is served, but for the times of creation, which are not told here."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@pytest.mark.parametrize("counted", [[], [("a", "x")], [("a", "x"), ("b", 'y"\n'), ("a", "x")]])
def test_counts_export_like_prometheus_counter(counted: list[tuple[str, str]]) -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    labels = ["policy", "replica"]
    counts = Counts("decisions_total", "Decisions.", labels, own)
    counter = Counter("decisions_total", "Decisions.", labels, registry=theirs)
    for values in counted:
        counts.add(*values)
        counter.labels(*values).inc()
    assert page(own) == page(theirs)


def test_spread_exports_like_prometheus_histogram() -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    bounds = (5e-5, 0.5, 1, 2.5, 100)
    spread = Spread("seconds", "Time.", bounds, own)
    histogram = Histogram("seconds", "Time.", buckets=bounds, registry=theirs)
    random = Random(0)
    for value in [*bounds, 0.0, 1000.0, *(random.expovariate(1.0) for _ in range(1000))]:
        spread.observe(value)
        histogram.observe(value)
    assert page(own) == page(theirs)


def test_labelled_spread_exports_like_prometheus_histogram() -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    labels = ["model", "objective"]
    spread = Spread("seconds", "Time.", (0.5, 1), own, labels)
    histogram = Histogram("seconds", "Time.", labels, buckets=(0.5, 1), registry=theirs)
    assert page(own) == page(theirs)
    for value, *values in [(0.1, "a", "x"), (0.7, "a", 'y"\n'), (3.0, "a", "x")]:
        spread.observe(float(value), *map(str, values))
        histogram.labels(*values).observe(float(value))
    assert page(own) == page(theirs)


def test_labels_of_clients_make_a_bounded_number_of_series() -> None:
    registry = CollectorRegistry()
    spread = Spread("seconds", "Time.", (1,), registry, ["model", "objective"])
    for number in [*range(1000), *range(1000)]:
        spread.observe(2.0, f"model {number}", "chat")
    counted = {
        tuple(one.labels.values()): one.value
        for family in registry.collect()
        for one in family.samples
        if one.name == "seconds_count"
    }
    assert len(counted) == 21
    assert counted["model 0", "chat"] == 2
    assert counted["other", "other"] == 2 * 980
