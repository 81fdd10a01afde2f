"""The manifests are rendered from the chart, and fit the Kubernetes API and the programs.

    python -m tests.config.test_kubernetes

writes the manifests again.
"""

import asyncio
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from jsonschema import Draft4Validator

from extproc import settings
from extproc.config import Config
from extproc.ground.address import split_address
from extproc.lab.harness.processes import free_port
from tests.envoy.test_envoy import around_the_fragment, running
from tests.kubernetes_api import KIND, RECORDED, endpoint_slice, terminating

ROOT = Path(__file__).parents[2]
CHART = ROOT / "docs" / "helm"
FILE = ROOT / "docs" / "kubernetes.yaml"
Manifest = dict[str, Any]


def parsed(text: str) -> list[Manifest]:
    return list(yaml.safe_load_all(text))


MANIFESTS = parsed(FILE.read_text(encoding="utf-8"))
DEPLOYMENTS = [item for item in MANIFESTS if item["kind"] == "Deployment"]


def rendered(**values: Any) -> dict[str, str]:
    """Files that Helm renders from the chart, by template; the default selector is that of the
    plain manifests."""
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(CHART)) as chart:
        plain = {"vllm": {"selector": {"app": "vllm"}}}
        files = chart.render(plain | values, name="any", namespace="default")
    return {name.rpartition("/")[2]: text for name, text in files.items()}


def title(manifest: Manifest) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def named(kind: str, name: str) -> Manifest:
    (found,) = (item for item in MANIFESTS if title(item) == f"{kind}-{name}")
    return found


def pod(deployment: Manifest) -> Manifest:
    return dict(deployment["spec"]["template"]["spec"])


def container(deployment: str) -> Manifest:
    (only,) = pod(named("Deployment", deployment))["containers"]
    return dict(only)


def config(deployment: str) -> Config:
    env = container(deployment)["env"]
    return settings.load({}, {item["name"]: item["value"] for item in env})


def strict(schema: Any) -> Any:
    """The schema without unknown fields, which the API server drops with a warning."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    return made | {"additionalProperties": False} if "properties" in schema else made


SCHEMAS = {"components": {"schemas": strict(json.loads((RECORDED / "schemas.json").read_text()))}}


def faults(manifest: Mapping[str, Any]) -> list[str]:
    """Errors of a manifest by the schemas of the Kubernetes API."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    kind = {"group": group, "version": version, "kind": manifest["kind"]}
    schemas, key = SCHEMAS["components"]["schemas"], "x-kubernetes-group-version-kind"
    (name,) = (name for name, schema in schemas.items() if kind in schema.get(key, ()))
    validator = Draft4Validator({"$ref": f"#/components/schemas/{name}"} | SCHEMAS)
    return [f"{item.json_path}: {item.message}" for item in validator.iter_errors(manifest)]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=title)
def test_manifest_is_valid(manifest: Manifest) -> None:
    assert faults(manifest) == []


def test_fake_api_serves_valid_slices() -> None:
    assert faults({**KIND, **endpoint_slice(terminating("10.1.0.1", "vllm-0"))}) == []


def test_invalid_manifest_is_found() -> None:
    wrong = copy.deepcopy(named("Deployment", "extproc-router"))
    (only,) = wrong["spec"]["template"]["spec"]["containers"]
    only["readynessProbe"] = only.pop("readinessProbe")
    only["ports"] = [{"containerPort": "http"}]
    del wrong["spec"]["selector"]
    found = " ".join(faults(wrong))
    assert all(part in found for part in ("'readynessProbe'", "'http' is not", "'selector' is a"))


def test_manifests_are_rendered_from_the_chart() -> None:
    files = rendered()
    again = "run: python -m tests.config.test_kubernetes"
    assert files["extproc.yaml"].strip() + "\n" == FILE.read_text(encoding="utf-8"), again
    (envoy,) = parsed(files["envoy.yaml"])
    assert faults(envoy) == []
    assert envoy["data"] == {"envoy.yaml": (ROOT / "envoy" / "envoy.yaml").read_text()}


def test_chart_supports_an_own_redis_and_gateway() -> None:
    url = {"name": "EXTPROC_REDIS__URL", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
    gateway = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gw"}}}]
    off, policy = {"enabled": False}, {"name": "EXTPROC_ROUTE__POLICY", "value": "lmetric"}
    files = rendered(redis=off, envoy=off, gateway=gateway, env=[url, policy])
    assert not files["envoy.yaml"].strip()
    manifests = parsed(files["extproc.yaml"])
    assert not [fault for item in manifests for fault in faults(item)]
    titles = {title(item) for item in MANIFESTS} - {title(item) for item in manifests}
    assert titles == {
        *("Service-redis", "Deployment-redis", "NetworkPolicy-redis", "Service-envoy"),
        *("Deployment-extproc-envoy", "PodDisruptionBudget-extproc-envoy"),
        "NetworkPolicy-extproc-envoy",
    }
    for deployment in (item for item in manifests if item["kind"] == "Deployment"):
        (only,) = pod(deployment)["containers"]
        names = [item["name"] for item in only["env"]]
        assert len(names) == len({*names})  # else the API server refuses it
        assert only["env"][-2] == url
    specs = {title(item): item["spec"] for item in manifests if "spec" in item}
    assert specs["NetworkPolicy-extproc-router"]["ingress"][0]["from"] == gateway
    assert "publishNotReadyAddresses" not in specs["Service-router"]  # a gateway may not check it
    with pytest.raises(Exception, match=r"gateway: who may ask routers"):
        rendered(envoy={"enabled": False})


def test_network_policy_admits_the_charts_envoy_to_routers() -> None:
    router = named("NetworkPolicy", "extproc-router")["spec"]
    envoy = named("Deployment", "extproc-envoy")["spec"]
    assert router["ingress"][0]["from"] == [{"podSelector": envoy["selector"]}]
    assert named("Service", "router")["spec"]["publishNotReadyAddresses"] is True


def test_network_policy_admits_extproc_to_redis() -> None:
    (rule,) = named("NetworkPolicy", "redis")["spec"]["ingress"]
    ((peer,),) = (item["podSelector"]["matchExpressions"] for item in rule["from"])
    assert peer["values"] == ["extproc-router", "extproc-poller", "extproc-eds"]


def test_vllm_pods_are_selected_by_the_given_label() -> None:
    files = rendered(vllm={"selector": {"model": "llama"}})
    (service,) = (item for item in parsed(files["extproc.yaml"]) if title(item) == "Service-vllm")
    assert service["spec"]["selector"] == {"model": "llama"}
    with pytest.raises(Exception, match=r"vllm\.selector: labels of your vLLM pods"):
        rendered(vllm={})


def test_replica_name_may_hold_an_apostrophe() -> None:
    source = {"url": "10.0.0.1:8000", "name": "joe's"}
    manifests = parsed(rendered(replicas=[source])["extproc.yaml"])
    (poller,) = (item for item in manifests if title(item) == "Deployment-extproc-poller")
    env = {item["name"]: item["value"] for item in pod(poller)["containers"][0]["env"]}
    assert json.loads(env["EXTPROC_REPLICAS"]) == [source]


def test_helm_lint_finds_no_error() -> None:
    helm = pytest.importorskip("helm_python")
    findings = helm.lint(str(CHART))
    assert findings["errors"] == []
    assert [item["error"] for item in findings["messages"]] == ["icon is recommended"]


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
        assert {"readinessProbe", "livenessProbe", "resources"} <= item.keys()
    watches = deployment["metadata"]["name"] == "extproc-poller"
    assert watches == spec.get("automountServiceAccountToken", True)


def test_pods_run_as_the_user_of_the_image() -> None:
    user = next(line for line in (ROOT / "Dockerfile").read_text().splitlines() if "USER" in line)
    for name in ("extproc-router", "extproc-poller"):
        said = pod(named("Deployment", name))["securityContext"]
        assert user == f"USER {said['runAsUser']}:{said['runAsGroup']}"


def test_poller_may_only_read_endpoint_slices() -> None:
    account = pod(named("Deployment", "extproc-poller"))["serviceAccountName"]
    binding, role = named("RoleBinding", account), named("Role", account)
    assert named("ServiceAccount", account)
    assert [item["name"] for item in binding["subjects"]] == [account]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
    assert role["rules"] == [{**slices, "verbs": ["list", "watch"]}]


@pytest.mark.parametrize(
    "deployment", [item for item in DEPLOYMENTS if item["spec"].get("replicas", 1) > 1], ids=title
)
def test_replicated_deployment_survives_a_node_drain(deployment: Manifest) -> None:
    name, selector = deployment["metadata"]["name"], deployment["spec"]["selector"]
    assert named("PodDisruptionBudget", name)["spec"] == {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",  # what is broken holds no node up
        "selector": selector,
    }
    (spread,) = pod(deployment)["topologySpreadConstraints"]
    assert spread["labelSelector"] == selector


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=title)
def test_network_policy_opens_each_container_port(deployment: Manifest) -> None:
    name, selector = deployment["metadata"]["name"], deployment["spec"]["selector"]
    policy = named("NetworkPolicy", name)["spec"]
    assert policy["podSelector"] == selector
    opened = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert opened == {port["containerPort"] for port in container(name)["ports"]}
    everybody = [rule for rule in policy["ingress"] if "from" not in rule]
    assert bool(everybody) == (name == "extproc-envoy")


@pytest.mark.parametrize(("name", "command"), [("router", "serve"), ("poller", "poll")])
def test_probes_use_the_admin_port(name: str, command: str) -> None:
    asked = container(f"extproc-{name}")
    assert asked["args"] == [command]
    said = config(f"extproc-{name}")
    admin = said.serve.admin if name == "router" else said.poll.admin
    for probe in ("readinessProbe", "livenessProbe"):
        assert asked[probe]["httpGet"]["port"] == split_address(admin)[1]


@pytest.mark.process
async def test_terminating_envoy_closes_client_connections(tmp_path: Path) -> None:
    ours = container("extproc-envoy")
    *command, script = ours["lifecycle"]["preStop"]["exec"]["command"]
    drain, _, sleep = script.rpartition("\nsleep ")
    grace = pod(named("Deployment", "extproc-envoy"))["terminationGracePeriodSeconds"]
    assert 0 < grace - int(sleep) < 60
    port, admin = free_port(), free_port()
    bootstrap = around_the_fragment(port, admin, "127.0.0.1:1", ["127.0.0.1:1"])
    async with (
        running(tmp_path, bootstrap, admin, ours["args"][2:]),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        async with client.get("/") as response:
            assert "connection" not in response.headers
        assert "9901" in drain
        hook = await asyncio.create_subprocess_exec(*command, drain.replace("9901", str(admin)))
        assert await hook.wait() == 0
        for _ in range(2):  # on new connections, too, which are still served
            async with client.get("/") as response:
                assert response.headers["connection"] == "close"


def test_termination_grace_period_exceeds_drain_s() -> None:
    spec = pod(named("Deployment", "extproc-router"))
    assert spec["terminationGracePeriodSeconds"] > config("extproc-router").serve.drain_s


def test_envoy_and_poller_use_existing_headless_services() -> None:
    envoy = yaml.safe_load((ROOT / "envoy" / "envoy.yaml").read_text(encoding="utf-8"))
    known = [
        item["endpoint"]["address"]["socket_address"]
        for cluster in envoy["static_resources"]["clusters"]
        for group in cluster["load_assignment"]["endpoints"]
        for item in group["lb_endpoints"]
    ]
    for name in ("router", "vllm"):
        service = named("Service", name)["spec"]
        assert service["clusterIP"] == "None"
        assert {"address": name, "port_value": service["ports"][0]["port"]} in known
    (replicas,) = config("extproc-poller").replicas
    assert replicas.where == "Service vllm, port 8000"


@pytest.mark.parametrize(
    "service",
    [item for item in MANIFESTS if item["kind"] == "Service" and title(item) != "Service-vllm"],
    ids=title,
)
def test_service_selects_pods_that_listen_on_its_port(service: dict[str, Any]) -> None:
    selector = service["spec"]["selector"]
    specs = [item["spec"] for item in DEPLOYMENTS]
    (pods,) = (item["template"] for item in specs if item["selector"]["matchLabels"] == selector)
    assert pods["metadata"]["labels"] == selector
    ports = [port["containerPort"] for item in pods["spec"]["containers"] for port in item["ports"]]
    (port,) = service["spec"]["ports"]
    assert port.get("targetPort", port["port"]) in ports


if __name__ == "__main__":
    FILE.write_text(rendered()["extproc.yaml"].strip() + "\n", encoding="utf-8")
