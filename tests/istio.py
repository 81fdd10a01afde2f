"""What Istio makes of our EnvoyFilter: its patches, applied to a gateway that has the two Services.

``data/gateways/istio.yaml`` is the gateway before: Istio's own listeners and clusters, and the
route of the VirtualService that the file's comment names.
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
    """The whole configuration of an Envoy; addresses are ``ip:port``.

    Raises:
        ValueError: a patch is about nothing that is there.
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
    way = patch["applyTo"], change["operation"]
    assert match["context"] == "GATEWAY"
    if way == ("LISTENER", "MERGE"):
        _merge(listener, change["value"])
        return
    if way == ("CLUSTER", "MERGE"):
        wanted = match["cluster"]
        name = f"outbound|{wanted['portNumber']}||{wanted['service']}"
        (cluster,) = (one for one in clusters if one["name"] == name)
        _merge(cluster, change["value"])
        return
    chosen = match["listener"]["filterChain"]["filter"]
    assert chosen["name"] == _MANAGER
    if way == ("NETWORK_FILTER", "MERGE"):
        _merge(manager, change["value"])
    elif way == ("HTTP_FILTER", "INSERT_BEFORE"):
        filters = manager["typed_config"]["http_filters"]
        names = [one["name"] for one in filters]
        filters.insert(names.index(chosen["subFilter"]["name"]), change["value"])
    else:
        raise ValueError(f"no patch of this kind is known here: {way}")


def _merge(target: dict[str, Any], change: Mapping[str, Any]) -> None:
    """As protobuf merges messages: lists grow, what is a message is merged, all else replaced."""
    for key, value in change.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        elif isinstance(value, list):
            target[key] = [*target.get(key, []), *value]
        else:
            target[key] = value
