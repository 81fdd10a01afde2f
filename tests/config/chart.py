"""Renders the Helm chart in ``docs/helm``, and generates files from other files.

    python -m tests.config.chart

writes the chart's schema of ``config``, its rules and dashboard, and the plain manifests.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft4Validator

from extproc.config import Config
from tests.kubernetes_api import RECORDED

ROOT = Path(__file__).parents[2]
CHART = ROOT / "docs" / "helm"
SCHEMA = CHART / "values.schema.json"
PLAIN = ROOT / "docs" / "kubernetes.yaml"
COPIES = ("rules.yaml", "dashboard.json")
OBSERVABILITY = ROOT / "docs" / "observability"
_PORTS = (
    ("ServeSettings", "listen", 50051),
    ("ServeSettings", "admin", 9090),
    ("PollSettings", "admin", 9091),
    ("EdsSettings", "listen", 18000),
)
"""Settings whose ports the chart's Services, probes and NetworkPolicies name."""
_BY_HELM = ("app.kubernetes.io/managed-by:", "helm.sh/chart:", "# Source:")
_HEAD = """\
# The whole router in plain manifests, as docs/helm renders them for the namespace `default`. Yours
# to change: the image `extproc:0.1.0` (build it from the Dockerfile); in extproc.yaml, the first
# object, the Service of your vLLM pods, their port and the hardware profile; the namespace of Role,
# RoleBinding and its subject. docs/kubernetes.md has more.
"""

Manifest = dict[str, Any]


def files(name: str = "extproc", namespace: str = "default", **values: Any) -> dict[str, str]:
    return _rendered(name, namespace, json.dumps(values))


@cache
def _rendered(name: str, namespace: str, values: str) -> dict[str, str]:
    """Render the chart, for equal arguments once per process; ``values`` is JSON."""
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(CHART)) as chart:
        made: dict[str, str] = chart.render(json.loads(values), name=name, namespace=namespace)
    return {name.rpartition("/")[2]: text for name, text in made.items()}


def manifests(**values: Any) -> list[Manifest]:
    """Objects of a release, the Pod of `helm test` included."""
    texts = (text for name, text in files(**values).items() if name.endswith(".yaml"))
    parsed = (yaml.load_all(text, yaml.CSafeLoader) for text in texts)
    return [item for documents in parsed for item in documents if item]


def title(manifest: Manifest) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def by_title(objects: list[Manifest]) -> dict[str, Manifest]:
    return {title(item): item for item in objects}


def pod(deployment: Manifest) -> Manifest:
    return dict(deployment["spec"]["template"]["spec"])


def container(deployment: Manifest) -> Manifest:
    (only,) = pod(deployment)["containers"]
    return dict(only)


def plain() -> str:
    order = ["config.yaml", "redis.yaml", "router.yaml", "poller.yaml", "eds.yaml", "envoy.yaml"]
    made = files()
    text = "---\n".join(made[name].strip("\n") + "\n" for name in order)
    lines = (line.rstrip() for line in text.splitlines())
    return _HEAD + "".join(f"{line}\n" for line in lines if not line.strip().startswith(_BY_HELM))


def schema() -> dict[str, Any]:
    """The schema of the values, with `config` and `replicas` as extproc defines them now."""
    made: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    config = _bare(Config.model_json_schema(ref_template="#/definitions/{model}"))
    parts = config.pop("$defs")
    for name in ("replicas", "pools"):  # values of their own
        del config["properties"][name]
    config["properties"]["state"] = {"enum": ["redis"]}  # several routers
    for part, setting, port in _PORTS:
        parts[part]["properties"][setting]["pattern"] = f":{port}$"
    pods = parts["KubernetesPods"]
    pods["properties"]["selector"] = {"type": "object", "additionalProperties": {"type": "string"}}
    kinds = ("service", "selector", "inference_pool")
    pods["oneOf"] = [{"required": [kind]} for kind in kinds]
    with_port = {"required": ["port"]}
    pods["dependencies"] = dict.fromkeys(kinds, with_port) | {"inference_pool": {"not": with_port}}
    return made | {"definitions": {**parts, "Config": config}}


def _bare(schema: Any) -> Any:
    """The schema without names, descriptions and defaults."""
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    names = {"properties", "$defs"}
    return {
        key: {name: _bare(item) for name, item in value.items()} if key in names else _bare(value)
        for key, value in schema.items()
        if key not in {"title", "description", "default", "format"}
    }


def strict(schema: Any) -> Any:
    """The schema without unknown fields, which the API server drops with a warning."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    return made | {"additionalProperties": False} if "properties" in schema else made


_SCHEMAS = {"components": {"schemas": strict(json.loads((RECORDED / "schemas.json").read_text()))}}
CUSTOM = {
    "cert-manager.io/v1": {"Certificate"},
    "gateway.networking.k8s.io/v1": {"HTTPRoute"},
    "monitoring.coreos.com/v1": {"ServiceMonitor", "PrometheusRule"},
}
"""Kinds of other projects, which the recorded API does not have."""


def faults(manifest: Manifest) -> list[str]:
    """Errors of a manifest by the schemas of the Kubernetes API."""
    version = manifest["apiVersion"]
    if version in CUSTOM:
        return [] if manifest["kind"] in CUSTOM[version] else [f"unknown kind {manifest['kind']}"]
    group, _, version = version.rpartition("/")
    kind = {"group": group, "version": version, "kind": manifest["kind"]}
    schemas, key = _SCHEMAS["components"]["schemas"], "x-kubernetes-group-version-kind"
    (name,) = (name for name, schema in schemas.items() if kind in schema.get(key, ()))
    validator = Draft4Validator({"$ref": f"#/components/schemas/{name}"} | _SCHEMAS)
    return [f"{item.json_path}: {item.message}" for item in validator.iter_errors(manifest)]


def write() -> None:
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
    for name in COPIES:
        (CHART / "files" / name).write_bytes((OBSERVABILITY / name).read_bytes())
    PLAIN.write_text(plain(), encoding="utf-8")


if __name__ == "__main__":
    write()
