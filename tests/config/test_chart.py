"""The Helm chart works with its own values and in real set-ups, the files in ``values/``."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc import settings
from extproc.config import Config
from extproc.envoy.check import check_envoy
from extproc.envoy.finding import Level
from extproc.lab.harness.envoy_config import socket_address
from extproc.lab.harness.processes import free_port
from tests.certificates import Authority
from tests.config import chart
from tests.config.chart import Manifest, by_title, container, faults, manifests, pod, title
from tests.envoy.test_envoy import running, validate

SETUPS: dict[str, dict[str, Any]] = {"default values": {}} | {
    file.stem: yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
    for file in sorted(Path(__file__).with_name("values").glob("*.yaml"))
}


COMPONENT = "app.kubernetes.io/component"


def config(objects: list[Manifest], directory: Path) -> Config:
    (text,) = (item["data"]["extproc.yaml"] for item in objects if title(item).endswith("-config"))
    if "/etc/tls/extproc" in text:
        certificate, key = Authority(directory / "ca").sign("extproc-router")
        text = text.replace("/etc/tls/extproc/ca.crt", str(directory / "ca" / "ca.pem"))
        text = text.replace("/etc/tls/extproc/tls.crt", str(certificate))
        text = text.replace("/etc/tls/extproc/tls.key", str(key))
    file = directory / "extproc.yaml"
    file.write_text(text, encoding="utf-8")
    return settings.load({}, {}, file)


def envoy_files(objects: list[Manifest]) -> dict[str, str]:
    (item,) = (item for item in objects if title(item).endswith("-envoy") and "data" in item)
    return dict(item["data"])


@pytest.mark.parametrize("setup", SETUPS)
def test_setup_is_rendered_and_valid(setup: str, tmp_path: Path) -> None:
    objects = manifests(**SETUPS[setup])
    assert [fault for item in objects for fault in faults(item)] == []
    keys = [(item["kind"], item["metadata"].get("namespace"), title(item)) for item in objects]
    assert len(keys) == len({*keys})
    for deployment in (item for item in objects if item["kind"] == "Deployment"):
        lists = (pod(deployment)["volumes"], *map(container(deployment).get, ("env", "ports")))
        for names in ([item["name"] for item in each or ()] for each in lists):
            assert len(names) == len({*names})  # else the API server refuses them
    made = config(objects, tmp_path)
    sources = {item.where for pool in made.each_pool for item in pool.replicas}
    assert len(sources) == sum(len(pool.replicas) for pool in made.each_pool)


@pytest.mark.parametrize("setup", SETUPS)
def test_setup_passes_helm_lint(setup: str) -> None:
    helm = pytest.importorskip("helm_python")
    found = helm.lint(str(chart.CHART), values=SETUPS[setup])
    assert found["errors"] == []
    assert [item["error"] for item in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("setup", [name for name in SETUPS if name != "inference_pool"])
def test_envoy_of_setup_follows_the_router(setup: str, tmp_path: Path) -> None:
    objects = manifests(**{"fullnameOverride": "extproc"} | SETUPS[setup])
    envoy = yaml.load(envoy_files(objects)["envoy.yaml"], yaml.CSafeLoader)
    findings = check_envoy(envoy, config(objects, tmp_path))
    assert [finding for finding in findings if finding.level is not Level.OK] == []


@pytest.mark.process
@pytest.mark.parametrize("setup", ["one_service", "tls", "two_pools", "observed"])
async def test_envoy_accepts_the_file_of_setup(setup: str, tmp_path: Path) -> None:
    data = envoy_files(manifests(**SETUPS[setup]))
    certificate, key = Authority(tmp_path / "ca").sign("extproc-envoy")
    places = {"/etc/envoy/": f"{tmp_path}/"}
    for folder in ("/etc/tls/extproc", "/etc/tls/clients"):
        places |= {
            f"{folder}/tls.crt": str(certificate),
            f"{folder}/tls.key": str(key),
            f"{folder}/ca.crt": str(tmp_path / "ca" / "ca.pem"),
            folder: str(tmp_path),
        }
    for name, text in data.items():
        for old, new in places.items():
            text = text.replace(old, new)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert "eprecated" not in await validate(tmp_path / "envoy.yaml")


def test_name_of_a_pool_may_have_a_dot(tmp_path: Path) -> None:
    pool = {"hosts": ["llm.example"], "replicas": [{"url": "10.0.0.6:8000"}]}
    objects = manifests(pools={"llama-3.1": pool})
    envoy = yaml.load(envoy_files(objects)["envoy.yaml"], yaml.CSafeLoader)
    findings = check_envoy(envoy, config(objects, tmp_path))
    assert {finding.level for finding in findings} == {Level.OK}


@pytest.mark.process
async def test_host_with_port_leads_to_its_pool(tmp_path: Path) -> None:
    """Clients name the port in the header ``host`` unless it is 80 or 443."""
    text = envoy_files(manifests(**SETUPS["two_pools"]))["envoy.yaml"]
    whole = yaml.load(text, yaml.CSafeLoader)
    port, admin = free_port(), free_port()
    (listener, _) = whole["static_resources"]["listeners"]
    listener["address"] = socket_address(f"127.0.0.1:{port}")
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = manager["http_filters"][-1:]
    for host in manager["route_config"]["virtual_hosts"]:
        answer = {"status": 200, "body": {"inline_string": host["name"]}}
        host |= {"typed_per_filter_config": {}}
        host["routes"] = [{"match": {"prefix": "/"}, "direct_response": answer}]
    alone = {
        "admin": {"address": socket_address(f"127.0.0.1:{admin}")},
        "static_resources": {"listeners": [listener]},
    }
    async with running(tmp_path, alone, admin), aiohttp.ClientSession() as session:
        for name, pool in (("batch.llm.example", "batch"), ("chat.llm.example", "default")):
            for host in (name, f"{name}:8080"):
                async with session.get(f"http://127.0.0.1:{port}/", headers={"host": host}) as got:
                    assert (host, await got.text()) == (host, pool)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"rooter": {"replicas": 5}}, "rooter"),
        ({"router": {"replica": 5}}, "replica"),
        ({"config": {"route": {"polcy": "random"}}}, "polcy"),
        ({"config": {"route": {"policy": "randm"}}}, "policy"),
        ({"config": {"state": "memory"}}, "state"),
        ({"config": {"serve": {"listen": "0.0.0.0:5005"}}}, "50051"),
        ({"config": {"poll": {"admin": "0.0.0.0:9090"}}}, "9091"),
        ({"replicas": [{"kubernetes": {"service": "a", "prt": 1}}]}, "kubernetes"),
        ({"replicas": [{"kubernetes": {"inference_pool": "a", "port": 1}}]}, "kubernetes"),
        ({"replicas": [{"kubernetes": {"inference_pool": "a", "selector": {"b": "c"}}}]},
         "kubernetes"),
        ({"config": None}, "missing property 'config'"),  # all lines below `config:` are comments
        ({"pools": None}, "missing property 'pools'"),
        ({"envoy": None}, "missing property 'envoy'"),
        ({"router": {"autoscaling": None}}, "missing property 'autoscaling'"),
        ({"image": "extproc"}, "image"),
        ({"fullnameOverride": "x" * 50}, "maxLength"),
        ({"envoy": {"service": {"type": "Loadbalancer"}}}, "type"),
        ({"redis": {"url": "redis.data:6379"}}, "url"),
        ({"redis": {"enabled": False}}, r"redis\.url: the existing Redis"),
        ({"envoy": {"enabled": False}}, r"networkPolicy\.gateway: who may ask routers"),
    ],
)  # fmt: skip
def test_wrong_or_missing_value_is_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        manifests(**wrong)


@pytest.mark.parametrize("part", ["networkPolicy.gateway", "envoy.requestHeaders"])
def test_list_whose_items_are_comments_is_empty(part: str) -> None:
    section, key = part.split(".")
    assert manifests(**{section: {key: None}}) == manifests()


def test_schema_and_copies_are_up_to_date() -> None:
    again = "run: python -m tests.config.chart"
    assert json.loads(chart.SCHEMA.read_text(encoding="utf-8")) == chart.schema(), again
    for name in chart.COPIES:
        copied = (chart.CHART / "files" / name).read_bytes()
        assert copied == (chart.OBSERVABILITY / name).read_bytes(), again
    assert not [file for file in chart.CHART.rglob("*") if file.is_symlink()]


@pytest.mark.parametrize(
    ("release", "own", "prefix"),
    [
        ("extproc", {}, "extproc"),
        ("llm", {}, "llm-extproc"),
        ("llm", {"fullnameOverride": "gw"}, "gw"),
        ("llm", {"nameOverride": "router"}, "llm-router"),
    ],
)
def test_releases_of_a_namespace_have_names_and_selectors_of_their_own(
    release: str, own: dict[str, str], prefix: str
) -> None:
    objects = manifests(name=release, **own)
    names = {item["metadata"]["name"] for item in objects}
    assert {name for name in names if not name.startswith(f"{prefix}-")} == set()
    labels = [item["metadata"]["labels"] for item in objects]
    labels += [item["spec"]["selector"] for item in objects if item["kind"] == "Service"]
    assert {each["app.kubernetes.io/instance"] for each in labels} == {release}


@pytest.mark.parametrize("own", [{"name": "x" * 53}, {"fullnameOverride": "x" * 49}])
def test_names_of_a_long_release_fit_in_63_characters(own: dict[str, str]) -> None:
    objects = manifests(**own, dashboard={"enabled": True})
    assert max(len(item["metadata"]["name"]) for item in objects) == 63


def test_password_of_existing_redis_comes_from_its_secret(tmp_path: Path) -> None:
    objects = manifests(**SETUPS["external_redis"])
    kinds = by_title(objects)
    assert "Deployment-extproc-redis" not in kinds
    secret = {"secretKeyRef": {"name": "redis-login", "key": "redis-password"}}
    for part in ("router", "poller", "eds"):
        env = container(kinds[f"Deployment-extproc-{part}"])["env"]
        assert {"name": "EXTPROC_REDIS__PASSWORD", "valueFrom": secret} in env
    assert config(objects, tmp_path).redis.options["host"] == "redis.data.svc"


def test_selector_makes_a_headless_service(tmp_path: Path) -> None:
    objects = manifests(**SETUPS["selectors"])
    made = [item for item in objects if item["kind"] == "Service"]
    services = {item["metadata"]["name"]: item["spec"] for item in made}
    sources = config(objects, tmp_path).replicas
    for source, port in zip(sources, ("http", 8000, 8001), strict=True):
        assert source.kubernetes is not None
        service = services[source.kubernetes.service]
        assert service["clusterIP"] == "None"
        assert service["ports"] == [{"name": "http", "port": 80, "targetPort": port}]


def test_changed_selector_or_port_changes_its_service_in_place() -> None:
    """Running pollers would lose the pods of a Service that Helm deletes."""

    def services(**changed: Any) -> list[tuple[str, str]]:
        first, *others = ({"selector": {"app": "vllm"}, "port": port} for port in ("a", 8000))
        sources = [{"kubernetes": source} for source in (first | changed, *others)]
        pools = {name: {"hosts": [name], "replicas": sources} for name in ("a.b", "a_b")}
        objects = manifests(replicas=sources, pools=pools)
        made = [item for item in objects if item["metadata"]["labels"][COMPONENT] == "replicas"]
        return [(item["metadata"]["name"], item["spec"]["ports"][0]["name"]) for item in made]

    before = services()
    assert len({name for name, _ in before}) == 6
    for changed in ({"selector": {"app": "other"}}, {"port": "b"}, {"port": 9}):
        assert services(**changed) == before


def test_poller_gets_a_role_in_each_namespace_of_services() -> None:
    roles = [item for item in manifests(**SETUPS["two_gpus"]) if item["kind"] == "Role"]
    assert [item["metadata"]["namespace"] for item in roles] == ["default", "gpu-a10"]
    for role in roles:
        assert [rule["resources"] for rule in role["rules"]] == [["endpointslices"]]


def test_poller_may_read_pods_only_beside_an_inference_pool() -> None:
    pools = [{"kubernetes": {"inference_pool": name, "namespace": "gpu"}} for name in "ab"]
    service = {"kubernetes": {"service": "vllm", "port": 8000}}
    roles = by_title(manifests(replicas=[*pools, service]))
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
    verbs = {"verbs": ["list", "watch"]}
    assert roles["Role-extproc-poller"]["rules"] == [slices | verbs]
    named = {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"]}
    pods = {"apiGroups": [""], "resources": ["pods"]}
    assert roles["Role-default-extproc-poller"]["rules"] == [
        named | {"resourceNames": ["a", "b"]} | verbs,
        pods | verbs,
    ]


def test_named_gateway_may_ask_routers() -> None:
    objects = by_title(manifests(**SETUPS["inference_pool"]))
    peers = objects["NetworkPolicy-extproc-router"]["spec"]["ingress"][0]["from"]
    assert peers == SETUPS["inference_pool"]["networkPolicy"]["gateway"]
    assert "Service-extproc-router-pods" not in objects  # only the chart's Envoy needs it


@pytest.mark.parametrize("peers", [[], None])
def test_nobody_reads_metrics_if_no_peer_monitors(peers: list[Manifest] | None) -> None:
    objects = manifests(networkPolicy={"monitoring": peers})
    policies = [item for item in objects if item["kind"] == "NetworkPolicy"]
    assert [fault for item in policies for fault in faults(item)] == []
    rules = {item["metadata"]["name"]: item["spec"].get("ingress") or () for item in policies}
    open_to_all = {
        (name, port["port"])
        for name, ingress in rules.items()
        for rule in ingress
        if "from" not in rule
        for port in rule["ports"]
    }
    assert open_to_all == {("extproc-envoy", 8080)}


def test_shipped_inference_pool_fits_the_chart() -> None:
    text = (chart.ROOT / "docs" / "inference_pool.yaml").read_text(encoding="utf-8")
    pool, route = yaml.load_all(text, yaml.CSafeLoader)
    (source,) = SETUPS["inference_pool"]["replicas"]
    assert pool["metadata"]["name"] == source["kubernetes"]["inference_pool"]
    (rule,) = route["spec"]["rules"]
    group = pool["apiVersion"].partition("/")[0]
    named = {"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}
    assert rule["backendRefs"] == [named]
    objects = by_title(manifests(**SETUPS["inference_pool"]))
    picker = pool["spec"]["endpointPickerRef"]
    ports = {item["port"]: item for item in objects[f"Service-{picker['name']}"]["spec"]["ports"]}
    assert "appProtocol" not in ports[picker["port"]["number"]]  # TLS, not plain HTTP/2


def test_redis_of_the_chart_asks_for_the_password_that_its_clients_send() -> None:
    secret = {"name": "redis", "key": "password"}
    objects = by_title(manifests(redis={"passwordSecret": secret}))
    redis = container(objects["Deployment-extproc-redis"])
    assert redis["args"][-2:] == ["--requirepass", "$(REDISCLI_AUTH)"]
    (own,) = redis["env"]
    assert (own["name"], own["valueFrom"]) == ("REDISCLI_AUTH", {"secretKeyRef": secret})
    for part in ("router", "poller", "eds"):
        env = container(objects[f"Deployment-extproc-{part}"])["env"]
        assert own["valueFrom"] in [item.get("valueFrom") for item in env]


def test_all_parts_speak_tls(tmp_path: Path) -> None:
    objects = by_title(manifests(**SETUPS["tls"]))
    made = config([*objects.values()], tmp_path)
    assert made.serve.tls_client_ca
    assert made.eds.tls_client_ca
    assert made.admin.tls_cert
    assert made.redis.url.startswith("rediss://")
    redis = container(objects["Deployment-extproc-redis"])
    assert redis["args"][redis["args"].index("--port") + 1] == "0"
    issued = {
        item["spec"]["secretName"] for item in objects.values() if item["kind"] == "Certificate"
    }
    for part in ("router", "poller", "eds", "redis", "envoy"):
        volumes = pod(objects[f"Deployment-extproc-{part}"])["volumes"]
        mounted = {item["secret"]["secretName"] for item in volumes if "secret" in item}
        assert mounted & issued
        probes = container(objects[f"Deployment-extproc-{part}"])["readinessProbe"]
        assert probes.get("httpGet", {}).get("scheme", "HTTPS") == "HTTPS"


def test_router_scales_by_its_own_cpu() -> None:
    objects = by_title(manifests(**SETUPS["tenants"]))
    deployment = objects["Deployment-extproc-router"]
    scaler = objects["HorizontalPodAutoscaler-extproc-router"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]
    spec = pod(deployment)
    assert {"name": "tokenizers", "mountPath": "/tokenizers", "readOnly": True} in (
        container(deployment)["volumeMounts"]
    )
    assert spec["nodeSelector"] == {"pool": "gateway"}
    assert "volumes" not in SETUPS["tenants"]["pods"]
    poller = pod(objects["Deployment-extproc-poller"])
    assert [item["name"] for item in poller["volumes"]] == ["extproc"]


def test_service_monitor_finds_routers_pollers_and_envoys() -> None:
    objects = manifests(**SETUPS["observed"])
    (monitor,) = (item for item in objects if item["kind"] == "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    found = {
        item["metadata"]["name"]
        for item in objects
        if item["kind"] == "Service"
        and wanted <= item["metadata"]["labels"].items()
        and any(port["name"] == "metrics" for port in item["spec"]["ports"])
    }
    assert found == {"extproc-router", "extproc-poller", "extproc-envoy-metrics"}
