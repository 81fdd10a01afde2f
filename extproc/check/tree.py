"""Finds Envoy's messages in a YAML or JSON tree, whatever they are wrapped in.

A message is known by its ``@type``, by the key it lies under (``clusters``, ``listeners``, …), or,
in Istio's EnvoyFilter, by the ``applyTo`` of its patch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Path = tuple[str | int, ...]

BOOTSTRAP = "envoy.config.bootstrap.v3.Bootstrap"
CLUSTER = "envoy.config.cluster.v3.Cluster"
LISTENER = "envoy.config.listener.v3.Listener"
ROUTE = "envoy.config.route.v3.RouteAction"
_HTTP = "envoy.extensions.filters.network.http_connection_manager.v3"
MANAGER = f"{_HTTP}.HttpConnectionManager"
HTTP_FILTER = f"{_HTTP}.HttpFilter"

_BY_KEY = {
    "clusters": CLUSTER,
    "listener": LISTENER,
    "listeners": LISTENER,
    "route": ROUTE,
    "http_connection_manager": MANAGER,
    "http_filters": HTTP_FILTER,
}
_BY_APPLY_TO = {
    "CLUSTER": CLUSTER,
    "LISTENER": LISTENER,
    "HTTP_FILTER": HTTP_FILTER,
    "HTTP_ROUTE": "envoy.config.route.v3.Route",
    "VIRTUAL_HOST": "envoy.config.route.v3.VirtualHost",
    "NETWORK_FILTER": "envoy.config.listener.v3.Filter",
}
_TYPED_STRUCT = re.compile(r"(udpa\.type\.v1|xds\.type\.v3)\.TypedStruct")


@dataclass(frozen=True, slots=True)
class Node:
    """One message as it is written."""

    path: Path
    type: str
    """Full name of its protobuf type."""
    fields: Mapping[str, object]
    inside: bool
    """Whether it is part of another node."""


def nodes(tree: object) -> Iterator[Node]:
    """Every message in the tree, outer ones first."""
    yield from _walk(tree, (), None, False, False)


def _walk(
    value: object, path: Path, expected: str | None, inside: bool, kubernetes: bool
) -> Iterator[Node]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index), expected, inside, kubernetes)
    if not isinstance(value, Mapping):
        return
    if isinstance(value.get("@type"), str):
        expected, value = _typed(value)
    elif "static_resources" in value or "staticResources" in value:
        expected = BOOTSTRAP
    if expected:
        yield Node(path, expected, value, inside)
    inside = inside or expected is not None
    # Kubernetes has things of its own under the same keys.
    kubernetes = not inside and (kubernetes or {"apiVersion", "kind"} <= value.keys())
    patch = value.get("patch")
    if "applyTo" in value and isinstance(patch, Mapping):
        kind = _BY_APPLY_TO.get(str(value["applyTo"]))
        yield from _walk(patch.get("value"), (*path, "patch", "value"), kind, inside, kubernetes)
        return
    for key, child in value.items():
        kind = None if kubernetes else _by_key(str(key), path, child)
        yield from _walk(child, (*path, str(key)), kind, inside, kubernetes)


def _by_key(key: str, path: Path, child: object) -> str | None:
    if path and path[-1] == "weighted_clusters":
        return None  # names and weights, not clusters
    kind = _BY_KEY.get(snake(key))
    return None if kind == ROUTE and not isinstance(child, Mapping) else kind


def _typed(value: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """Type and fields of an ``Any``; a TypedStruct is looked into."""
    name = str(value["@type"]).rpartition("/")[2]
    fields = {key: item for key, item in value.items() if key != "@type"}
    inner = fields.get("value")
    if _TYPED_STRUCT.fullmatch(name) and isinstance(inner, Mapping):
        url = fields.get("type_url") or fields.get("typeUrl") or ""
        return str(url).rpartition("/")[2], inner
    return name, fields


def is_of_envoy_gateway(tree: object) -> bool:
    """Whether it holds a resource of Envoy Gateway's own."""
    documents = tree if isinstance(tree, list) else [tree]
    versions = [str(one.get("apiVersion")) for one in documents if isinstance(one, Mapping)]
    return any(one.startswith("gateway.envoyproxy.io/") for one in versions)


def snake(key: str) -> str:
    """``camelCase``, as JSON may be written, to ``snake_case``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()


def written(path: Path) -> str:
    """``static_resources.listeners[0].name``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
