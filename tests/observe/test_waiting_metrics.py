"""Metrics of what waits: by objective and tenant, and never many series."""

from prometheus_client import CollectorRegistry

from extproc.observe.metrics import RouterMetrics

WAITING, SHARE = "extproc_requests_waiting", "extproc_tenant_share"


def values(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    samples = [one for family in registry.collect() for one in family.samples if one.name == name]
    return {tuple(one.labels.values()): one.value for one in samples}


def test_waiting_and_share_are_exported_by_tenant() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.tell_waiting([("chat", "red", 3), ("", "red", 1)], [("red", 3.0), ("blue", 1.0)])
    assert values(registry, WAITING) == {("", ""): 0, ("chat", "red"): 3, ("", "red"): 1}
    assert values(registry, SHARE) == {("red",): 0.75, ("blue",): 0.25}
    metrics.tell_waiting([], [])
    assert values(registry, WAITING) == {("", ""): 0}
    assert values(registry, SHARE) == {}


def test_only_the_largest_tenants_are_named() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    held = [("chat", str(tenant), tenant) for tenant in range(1, 1001)]
    got = [(str(tenant), float(tenant)) for tenant in range(1, 1001)] * 2  # of two pools
    metrics.tell_waiting(held, got)
    most = {str(tenant) for tenant in range(996, 1001)}
    waiting, shares = values(registry, WAITING), values(registry, SHARE)
    assert {tenant for _, tenant in waiting} == most | {"other", ""}
    assert {tenant for (tenant,) in shares} == most | {"other"}
    assert sum(waiting.values()) == 500_500
    assert abs(sum(shares.values()) - 1.0) < 1e-9
