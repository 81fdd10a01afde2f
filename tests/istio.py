"""What Istio makes of our EnvoyFilter: its patches, applied to a gateway that has the two Services.

What the gateway is before is as Istio's own listeners and clusters are, as far as it matters here;
the route is what the VirtualService asks for that the file's comment names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from extproc.lab.harness.envoy_config import endpoints, socket_address

REPLICAS = "outbound|8000||vllm.default.svc.cluster.local"
ROUTER = "outbound|50051||router.default.svc.cluster.local"

_TYPES = "type.googleapis.com/envoy"
_HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_MANAGER = "envoy.filters.network.http_connection_manager"
_LAST = "envoy.filters.http.router"


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
    listener = _listener(listen)
    clusters = [_cluster(REPLICAS, replicas), _cluster(ROUTER, routers, grpc=True)]
    (resource,) = resources
    for patch in resource["spec"]["configPatches"]:
        _apply(patch, listener, clusters)
    return {
        "admin": {"address": socket_address(admin)},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


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


def _listener(address: str) -> dict[str, Any]:
    previous = "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    action = {
        "cluster": REPLICAS,
        "timeout": "0s",
        "retry_policy": {
            "num_retries": 1,
            "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
            "retriable_status_codes": [500, 502, 503],
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {"@type": f"{_TYPES}.{previous}"},
                }
            ],
            "host_selection_retry_max_attempts": 5,
        },
    }
    host = {
        "name": "*:80",
        "domains": ["*"],
        "routes": [{"match": {"prefix": "/"}, "route": action}],
    }
    manager = {
        "@type": f"{_TYPES}.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "outbound_0.0.0.0_8080",
        "use_remote_address": True,
        "forward_client_cert_details": "SANITIZE_SET",
        "normalize_path": True,
        "http_filters": [
            {
                "name": _LAST,
                "typed_config": {"@type": f"{_TYPES}.extensions.filters.http.router.v3.Router"},
            }
        ],
        "route_config": {"name": "http.8080", "virtual_hosts": [host]},
    }
    return {
        "name": "0.0.0.0_8080",
        "address": socket_address(address),
        "filter_chains": [{"filters": [{"name": _MANAGER, "typed_config": manager}]}],
    }


def _cluster(name: str, members: Sequence[str], grpc: bool = False) -> dict[str, Any]:
    cluster = {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "10s",
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": 4294967295,
                    "max_requests": 4294967295,
                    "max_retries": 4294967295,
                }
            ]
        },
        "load_assignment": {"cluster_name": name, "endpoints": endpoints(members)},
    }
    if grpc:
        options = {
            "@type": f"type.googleapis.com/{_HTTP}",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
        cluster["typed_extension_protocol_options"] = {_HTTP: options}
    return cluster
