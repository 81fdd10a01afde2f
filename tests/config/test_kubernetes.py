"""The plain manifests, which the chart renders, fit the Kubernetes API and the programs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc import settings
from extproc.config import Config
from extproc.ground.address import split_address
from extproc.proxy.body_memory import BODY_MEMORY_BYTES
from tests.config import chart
from tests.config.chart import Manifest, by_title, container, faults, pod, title
from tests.kubernetes_api import KIND, endpoint_slice, terminating

MANIFESTS = list(yaml.load_all(chart.PLAIN.read_text(encoding="utf-8"), yaml.CSafeLoader))
OBJECTS = by_title(MANIFESTS)
DEPLOYMENTS = [item for item in MANIFESTS if item["kind"] == "Deployment"]


def part(name: str) -> Manifest:
    return OBJECTS[f"Deployment-extproc-{name}"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "extproc.yaml"
    file.write_text(OBJECTS["ConfigMap-extproc-config"]["data"]["extproc.yaml"], encoding="utf-8")
    return settings.load({}, {}, file)


def test_manifests_are_rendered_from_the_chart() -> None:
    again = "run: python -m tests.config.chart"
    assert chart.plain() == chart.PLAIN.read_text(encoding="utf-8"), again


def test_fake_api_serves_valid_slices() -> None:
    assert faults({**KIND, **endpoint_slice(terminating("10.1.0.1", "vllm-0"))}) == []


def test_invalid_manifest_is_found() -> None:
    wrong = copy.deepcopy(part("router"))
    (only,) = wrong["spec"]["template"]["spec"]["containers"]
    only["readynessProbe"] = only.pop("readinessProbe")
    only["ports"] = [{"containerPort": "http"}]
    del wrong["spec"]["selector"]
    found = " ".join(faults(wrong))
    assert all(part in found for part in ("'readynessProbe'", "'http' is not", "'selector' is a"))


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=title)
def test_pod_has_least_privileges(deployment: Manifest) -> None:
    spec = pod(deployment)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for item in spec["containers"]:
        assert item["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"readinessProbe", "resources"} <= item.keys()
    watches = deployment["metadata"]["name"] == "extproc-poller"
    assert watches == spec.get("automountServiceAccountToken", True)


def test_pods_run_as_the_user_of_the_image() -> None:
    dockerfile = (chart.ROOT / "Dockerfile").read_text()
    user = next(line for line in dockerfile.splitlines() if "USER" in line)
    for name in ("router", "poller", "eds"):
        said = pod(part(name))["securityContext"]
        assert user == f"USER {said['runAsUser']}:{said['runAsGroup']}"


def test_poller_has_the_rights_of_its_role() -> None:
    account = pod(part("poller"))["serviceAccountName"]
    binding, role = OBJECTS[f"RoleBinding-{account}"], OBJECTS[f"Role-{account}"]
    assert f"ServiceAccount-{account}" in OBJECTS
    assert [item["name"] for item in binding["subjects"]] == [account]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


@pytest.mark.parametrize(
    "deployment", [item for item in DEPLOYMENTS if item["spec"].get("replicas", 1) > 1], ids=title
)
def test_replicated_deployment_survives_a_node_drain(deployment: Manifest) -> None:
    name, selector = deployment["metadata"]["name"], deployment["spec"]["selector"]
    assert OBJECTS[f"PodDisruptionBudget-{name}"]["spec"] == {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",  # what is broken holds no node up
        "selector": selector,
    }
    (spread,) = pod(deployment)["topologySpreadConstraints"]
    assert spread["labelSelector"] == selector


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=title)
def test_network_policy_opens_each_container_port(deployment: Manifest) -> None:
    name, selector = deployment["metadata"]["name"], deployment["spec"]["selector"]
    policy = OBJECTS[f"NetworkPolicy-{name}"]["spec"]
    assert policy["podSelector"] == selector
    opened = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert opened == {port["containerPort"] for port in container(deployment)["ports"]}
    everybody = [rule for rule in policy["ingress"] if "from" not in rule]
    assert bool(everybody) == (name == "extproc-envoy")


@pytest.mark.parametrize("of", ["router", "eds"])
def test_network_policy_admits_the_envoy(of: str) -> None:
    rule = OBJECTS[f"NetworkPolicy-extproc-{of}"]["spec"]["ingress"][0]
    assert rule["from"] == [{"podSelector": part("envoy")["spec"]["selector"]}]


def test_network_policy_admits_routers_to_each_others_decisions() -> None:
    """``extproc explain`` in a router's pod asks all routers."""
    rule = OBJECTS["NetworkPolicy-extproc-router"]["spec"]["ingress"][1]
    assert rule["ports"] == [{"port": 9090}]
    assert {"podSelector": part("router")["spec"]["selector"]} in rule["from"]


def test_network_policy_admits_extproc_to_redis() -> None:
    (rule,) = OBJECTS["NetworkPolicy-extproc-redis"]["spec"]["ingress"]
    selectors = [item["podSelector"] for item in rule["from"]]
    assert selectors[:3] == [part(name)["spec"]["selector"] for name in ("router", "poller", "eds")]


def test_probes_use_the_admin_port(config: Config) -> None:
    for name, command, admin in (
        ("router", "serve", config.serve.admin),
        ("poller", "poll", config.poll.admin),
    ):
        asked = container(part(name))
        assert asked["args"] == [command]
        ports = {item["name"]: item["containerPort"] for item in asked["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            assert ports[asked[probe]["httpGet"]["port"]] == split_address(admin)[1]


def test_eds_that_knows_no_replica_is_not_ready_and_not_restarted() -> None:
    """The port of eds is closed until then, as after an upgrade to a wrong ``redis.url``."""
    probes = {name: value for name, value in container(part("eds")).items() if "Probe" in name}
    assert probes == {"readinessProbe": {"tcpSocket": {"port": "grpc"}, "periodSeconds": 1}}


@pytest.mark.parametrize("name", ["router", "poller", "redis", "envoy"])
def test_slow_start_is_no_reason_to_restart(name: str) -> None:
    deployment = part(name)
    probe = container(deployment)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 60
    for kind in ("startupProbe", "livenessProbe"):
        assert container(deployment)[kind]["timeoutSeconds"] >= 5


def test_envoy_is_ready_when_it_knows_the_replicas() -> None:
    """Envoy then opens its port; without the probes of another port it would be restarted."""
    eds = envoy_clusters()["replicas"]["eds_cluster_config"]["eds_config"]
    assert eds["initial_fetch_timeout"] == "0s"
    probes = container(part("envoy"))
    assert probes["readinessProbe"]["tcpSocket"]["port"] == "http"
    for probe in ("startupProbe", "livenessProbe"):
        assert "9901" in probes[probe]["exec"]["command"][-1]


def test_termination_grace_period_exceeds_drain_s(config: Config) -> None:
    assert pod(part("router"))["terminationGracePeriodSeconds"] > config.serve.drain_s


def test_envoy_asks_a_service_of_all_routers_while_dns_names_no_living_router() -> None:
    pods, service = envoy_clusters()["router"]["load_assignment"]["endpoints"]
    assert "priority" not in pods
    assert service["priority"] == 1
    for group, name in ((pods, "extproc-router-pods"), (service, "extproc-router-any")):
        (item,) = group["lb_endpoints"]
        assert item["endpoint"]["address"]["socket_address"]["address"] == name
    assert OBJECTS["Service-extproc-router-pods"]["spec"]["clusterIP"] == "None"
    of_all = OBJECTS["Service-extproc-router-any"]["spec"]
    assert "clusterIP" not in of_all
    assert of_all["publishNotReadyAddresses"], "health checks are sooner than probes of pods"
    for name in ("extproc-router", "extproc-router-pods"):
        assert "publishNotReadyAddresses" not in OBJECTS[f"Service-{name}"]["spec"]


def test_memory_limit_of_routers_fits_their_streams(config: Config) -> None:
    """A router has 150 MiB, 24 kB a stream, and up to 256 MiB of bodies (docs/operations)."""
    limit = container(part("router"))["resources"]["limits"]["memory"]
    needed = 150 * 2**20 + config.serve.max_streams * 24_000 + BODY_MEMORY_BYTES
    assert needed < int(limit.removesuffix("Mi")) * 2**20


def test_requested_cpu_fits_a_small_node() -> None:
    asked = 0.0
    for item in DEPLOYMENTS:
        cpu = container(item)["resources"]["requests"]["cpu"]
        asked += item["spec"].get("replicas", 1) * int(cpu.removesuffix("m")) * 0.001
    assert asked < 1.5


def envoy_clusters() -> dict[str, Any]:
    envoy = yaml.load(OBJECTS["ConfigMap-extproc-envoy"]["data"]["envoy.yaml"], yaml.CSafeLoader)
    return {cluster["name"]: cluster for cluster in envoy["static_resources"]["clusters"]}


def test_envoy_and_processes_use_existing_services(config: Config) -> None:
    known = [
        item["endpoint"]["address"]["socket_address"]
        for cluster in envoy_clusters().values()
        for group in cluster.get("load_assignment", {}).get("endpoints", ())
        for item in group["lb_endpoints"]
    ]
    for name in ("extproc-router-any", "extproc-router-pods", "extproc-eds"):
        service = OBJECTS[f"Service-{name}"]["spec"]
        assert {"address": name, "port_value": service["ports"][0]["port"]} in known
    assert config.redis.options["host"] == "extproc-redis"
    (replicas,) = config.replicas
    assert replicas.where == "Service vllm, port 8000"


@pytest.mark.parametrize(
    "service", [item for item in MANIFESTS if item["kind"] == "Service"], ids=title
)
def test_service_selects_pods_that_listen_on_its_port(service: Manifest) -> None:
    selector = service["spec"]["selector"]
    specs = [item["spec"] for item in DEPLOYMENTS]
    (pods,) = (item["template"] for item in specs if item["selector"]["matchLabels"] == selector)
    assert selector.items() <= pods["metadata"]["labels"].items()
    named = {
        key: port["containerPort"]
        for item in pods["spec"]["containers"]
        for port in item["ports"]
        for key in (port["name"], port["containerPort"])
    }
    assert all(port.get("targetPort", port["port"]) in named for port in service["spec"]["ports"])
