"""Labels of clients stay bounded, and gauges name tenants, models and replicas."""

from dataclasses import replace

from prometheus_client import CollectorRegistry

from extproc.observe.metrics import RouterMetrics
from extproc.predict.step import hardware_profile
from extproc.replica_state import ReplicaState


def values(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {tuple(found.labels.values()): found.value for found in samples if found.name == name}


def test_labels_of_clients_make_a_bounded_number_of_series(registry: CollectorRegistry) -> None:
    completion = RouterMetrics(registry).completion
    for number in [*range(1000), *range(1000)]:
        completion.observe(2.0, 1.0, f"model {number}", "chat")
    for name in ("extproc_completion_seconds_count", "extproc_completion_predicted_ratio_count"):
        counted = values(registry, name)
        assert len(counted) == 21
        assert counted["model 0", "chat"] == 2
        assert counted["other", "other"] == 2 * 980
    assert completion.totals() == [0] * 5 + [2000] * 8


def test_waiting_and_share_are_exported_by_tenant(registry: CollectorRegistry) -> None:
    metrics = RouterMetrics(registry)
    waiting, share = "extproc_requests_queued", "extproc_tenant_share_ratio"
    metrics.set_waiting([(("chat", "red"), 3), (("", "red"), 1)], [("red", 3.0), ("blue", 1.0)])
    assert values(registry, waiting) == {("", ""): 0, ("chat", "red"): 3, ("", "red"): 1}
    assert values(registry, share) == {("red",): 0.75, ("blue",): 0.25}
    metrics.set_waiting([], [])
    assert values(registry, waiting) == {("", ""): 0}
    assert values(registry, share) == {}
    queued = [(("chat", str(tenant)), tenant) for tenant in range(1, 1001)]
    used = [(str(tenant), float(tenant)) for tenant in range(1, 1001)] * 2  # of two pools
    metrics.set_waiting(queued, used)
    most = {str(tenant) for tenant in range(996, 1001)}
    assert {tenant for _, tenant in values(registry, waiting)} == most | {"other", ""}
    assert {tenant for (tenant,) in values(registry, share)} == most | {"other"}
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


def test_learned_speeds_are_exported_by_phase(registry: CollectorRegistry) -> None:
    metrics, profile = RouterMetrics(registry), hardware_profile("llama-8b-a10")
    learned = replace(profile.step.slowed(2.0), c_prefill=4.0 * profile.step.c_prefill)
    states = [
        ReplicaState(id="a", profile=profile.name, learned=learned, measured=True),
        ReplicaState(id="b", profile=profile.name, learned=learned),
        ReplicaState(id="c", measured=True),
    ]
    metrics.set_speeds(states)
    assert values(registry, "extproc_replica_speed_ratio") == {
        ("a", profile.name, "decode"): 0.5,
        ("a", profile.name, "prefill"): 0.25,
    }
    learned = replace(learned, c_prefill=0.0)
    metrics.set_speeds([ReplicaState(id="a", profile=profile.name, learned=learned, measured=True)])
    assert list(values(registry, "extproc_replica_speed_ratio").values()) == [0.5]
