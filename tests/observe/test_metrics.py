from random import Random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from extproc.observe.metrics import RouterMetrics
from extproc.observe.tally import Counts, Spread

OWN = "seconds", "Time."


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def theirs() -> CollectorRegistry:
    return CollectorRegistry()


def page(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def values(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    samples = [one for family in registry.collect() for one in family.samples if one.name == name]
    return {tuple(one.labels.values()): one.value for one in samples}


@pytest.mark.parametrize("counted", [[], [("a", "x")], [("a", "x"), ("b", 'y"\n'), ("a", "x")]])
def test_counts_export_like_prometheus_counter(
    counted: list[tuple[str, str]], registry: CollectorRegistry, theirs: CollectorRegistry
) -> None:
    labels = ["policy", "replica"]
    counts = Counts("decisions_total", "Decisions.", labels, registry)
    counter = Counter("decisions_total", "Decisions.", labels, registry=theirs)
    for labels in map(list, counted):
        counts.add(*labels)
        counter.labels(*labels).inc()
    assert page(registry) == page(theirs)


def test_spread_is_a_histogram(registry: CollectorRegistry, theirs: CollectorRegistry) -> None:
    bounds, random = (5e-5, 0.5, 1, 2.5, 100), Random(0)
    spread = Spread(*OWN, bounds, registry)
    histogram = Histogram(*OWN, buckets=bounds, registry=theirs)
    for value in [*bounds, 0.0, 1000.0, *(random.expovariate(1.0) for _ in range(1000))]:
        spread.observe(value)
        histogram.observe(value)
    assert page(registry) == page(theirs)


def test_labelled_spread_exports_like_prometheus_histogram(
    registry: CollectorRegistry, theirs: CollectorRegistry
) -> None:
    labels = ["model", "objective"]
    spread = Spread(*OWN, (0.5, 1), registry, labels)
    histogram = Histogram(*OWN, labels, buckets=(0.5, 1), registry=theirs)
    assert page(registry) == page(theirs)
    for value, model, objective in ((0.1, "a", "x"), (0.7, "a", 'y"\n'), (3.0, "a", "x")):
        spread.observe(value, model, objective)
        histogram.labels(model, objective).observe(value)
    assert page(registry) == page(theirs)


def test_labels_of_clients_make_a_bounded_number_of_series(registry: CollectorRegistry) -> None:
    spread = Spread(*OWN, (1,), registry, ["model", "objective"])
    for number in [*range(1000), *range(1000)]:
        spread.observe(2.0, f"model {number}", "chat")
    counted = values(registry, "seconds_count")
    assert len(counted) == 21
    assert counted["model 0", "chat"] == 2
    assert counted["other", "other"] == 2 * 980


def test_waiting_and_share_are_exported_by_tenant(registry: CollectorRegistry) -> None:
    metrics = RouterMetrics(registry)
    waiting, share = "extproc_requests_waiting", "extproc_tenant_share"
    metrics.set_waiting([("chat", "red", 3), ("", "red", 1)], [("red", 3.0), ("blue", 1.0)])
    assert values(registry, waiting) == {("", ""): 0, ("chat", "red"): 3, ("", "red"): 1}
    assert values(registry, share) == {("red",): 0.75, ("blue",): 0.25}
    metrics.set_waiting([], [])
    assert values(registry, waiting) == {("", ""): 0}
    assert values(registry, share) == {}
    held = [("chat", str(tenant), tenant) for tenant in range(1, 1001)]
    got = [(str(tenant), float(tenant)) for tenant in range(1, 1001)] * 2  # of two pools
    metrics.set_waiting(held, got)
    named = {str(tenant) for tenant in range(996, 1001)}  # those with the most
    assert {tenant for _, tenant in values(registry, waiting)} == named | {"other", ""}
    assert {tenant for (tenant,) in values(registry, share)} == named | {"other"}
    assert sum(values(registry, waiting).values()) == 500_500
    assert abs(sum(values(registry, share).values()) - 1.0) < 1e-9


def test_unserved_is_exported_by_model(registry: CollectorRegistry) -> None:
    metrics, name = RouterMetrics(registry), "extproc_requests_unserved"
    metrics.set_unserved({"one": {"llama": 2}, "two": {"llama": 1}})
    assert values(registry, name) == {("one", "llama"): 2, ("two", "llama"): 1}
    metrics.set_unserved({"one": {str(model): model for model in range(1, 1001)}})
    named = values(registry, name)
    assert len(named) == 21
    assert named["one", "other"] == sum(range(1, 981))
    metrics.set_unserved({"one": {}})
    assert values(registry, name) == {}
