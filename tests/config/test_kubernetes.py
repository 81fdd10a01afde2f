"""The manifests agree with what the programs in them listen on, ask for and need."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc import settings
from extproc.address import split_address
from extproc.config import Config

ROOT = Path(__file__).parents[2]
MANIFESTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((ROOT / "docs" / "kubernetes.yaml").read_text(encoding="utf-8"))
)


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in MANIFESTS if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def container(deployment: str) -> dict[str, Any]:
    (only,) = named("Deployment", deployment)["spec"]["template"]["spec"]["containers"]
    return dict(only)


def config() -> Config:
    return settings.load({}, named("ConfigMap", "extproc")["data"])


@pytest.mark.parametrize(("name", "command"), [("router", "serve"), ("poller", "poll")])
def test_probes_ask_the_admin_port(name: str, command: str) -> None:
    asked = container(f"extproc-{name}")
    assert asked["args"] == [command]
    admin = config().serve.admin if name == "router" else config().poll.admin
    for probe in ("readinessProbe", "livenessProbe"):
        assert asked[probe]["httpGet"]["port"] == split_address(admin)[1]


def test_a_router_has_the_time_it_needs_to_drain() -> None:
    pod = named("Deployment", "extproc-router")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > config().serve.drain_s


def test_envoy_and_poller_find_pods_by_the_names_of_headless_services() -> None:
    envoy = yaml.safe_load((ROOT / "envoy" / "envoy.yaml").read_text(encoding="utf-8"))
    known = {
        (address["address"], address["port_value"])
        for cluster in envoy["static_resources"]["clusters"]
        for group in cluster["load_assignment"]["endpoints"]
        for one in group["lb_endpoints"]
        for address in [one["endpoint"]["address"]["socket_address"]]
    }
    for name in ("router", "vllm"):
        service = named("Service", name)["spec"]
        assert service["clusterIP"] == "None"
        assert (name, service["ports"][0]["port"]) in known
    (replicas,) = config().replicas
    assert replicas.dns == "vllm:8000"


@pytest.mark.parametrize(
    "service",
    [one for one in MANIFESTS if one["kind"] == "Service"],
    ids=lambda one: str(one["metadata"]["name"]),
)
def test_a_service_finds_pods_that_listen_on_its_port(service: dict[str, Any]) -> None:
    if service["metadata"]["name"] == "vllm":
        return  # the user's own
    selector = service["spec"]["selector"]
    (pods,) = (
        one["spec"]["template"]
        for one in MANIFESTS
        if one["kind"] == "Deployment" and one["spec"]["selector"]["matchLabels"] == selector
    )
    assert pods["metadata"]["labels"] == selector
    ports = [port["containerPort"] for one in pods["spec"]["containers"] for port in one["ports"]]
    (port,) = service["spec"]["ports"]
    assert port.get("targetPort", port["port"]) in ports
