"""Applies the patches of our EnvoyFilter to a gateway's Envoy configuration, as Istio does.

``data/gateways/istio.yaml`` is the gateway before the patches: Istio's listeners and clusters, and
the route of the VirtualService that the file's comment names.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from extproc.lab.harness.envoy_config import endpoints, socket_address

GATEWAY = Path(__file__).parent / "data" / "gateways" / "istio.yaml"
_MANAGER = "envoy.filters.network.http_connection_manager"


def bootstrap(
    resources: Sequence[Mapping[str, Any]],
    listen: str,
    admin: str,
    replicas: Sequence[str],
    routers: Sequence[str],
) -> dict[str, Any]:
    """Returns a whole Envoy configuration; addresses are ``ip:port``.

    Raises:
        ValueError: a patch matches nothing, or is of an unknown kind.
    """
    gateway = yaml.safe_load(GATEWAY.read_text(encoding="utf-8"))
    (listener,), clusters = gateway.values()
    listener["address"] = socket_address(listen)
    for cluster, members in zip(clusters, (replicas, routers), strict=True):
        cluster["load_assignment"]["endpoints"] = endpoints(members)
    (resource,) = resources
    for patch in resource["spec"]["configPatches"]:
        _apply(patch, listener, clusters)
    return {"admin": {"address": socket_address(admin)}, "static_resources": gateway}


def _apply(patch: Mapping[str, Any], listener: Any, clusters: list[Any]) -> None:
    manager = listener["filter_chains"][0]["filters"][0]
    match, change = patch["match"], patch["patch"]
    kind = patch["applyTo"], change["operation"]
    assert match["context"] == "GATEWAY"
    if kind == ("LISTENER", "MERGE"):
        _merge(listener, change["value"])
        return
    if kind == ("CLUSTER", "MERGE"):
        wanted = match["cluster"]
        name = f"outbound|{wanted['portNumber']}||{wanted['service']}"
        (cluster,) = (cluster for cluster in clusters if cluster["name"] == name)
        _merge(cluster, change["value"])
        return
    chosen = match["listener"]["filterChain"]["filter"]
    assert chosen["name"] == _MANAGER
    if kind == ("NETWORK_FILTER", "MERGE"):
        _merge(manager, change["value"])
    elif kind == ("HTTP_FILTER", "INSERT_BEFORE"):
        filters = manager["typed_config"]["http_filters"]
        names = [filter_["name"] for filter_ in filters]
        filters.insert(names.index(chosen["subFilter"]["name"]), change["value"])
    else:
        raise ValueError(f"unknown kind of patch: {kind}")


def _merge(target: dict[str, Any], change: Mapping[str, Any]) -> None:
    """Merges as protobuf does: extends lists, merges messages, replaces all other values."""
    for key, value in change.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        elif isinstance(value, list):
            target[key] = [*target.get(key, []), *value]
        else:
            target[key] = value
