"""What Envoy Gateway makes of our resources for it: the Envoy configuration they stand for.

Only the fields that our file uses are known here, by their names in Envoy Gateway's API (v1alpha1,
as of release 1.9); any other is refused. The result, and what Envoy Gateway adds of its own, is as
its translator writes it, but for where members and routes come from: they are in it, not from xDS.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from extproc.lab.harness.envoy_config import endpoints, socket_address

_REPLICAS = "httproute/default/vllm/rule/0"
_ROUTER = "envoyextensionpolicy/default/vllm/extproc/0"
_EXT_PROC = f"envoy.filters.http.ext_proc/{_ROUTER}"
_TYPES = "type.googleapis.com/envoy"
_FILTERS = f"{_TYPES}.extensions.filters"
_BODY_MODES = {"Buffered": "BUFFERED", "FullDuplexStreamed": "FULL_DUPLEX_STREAMED"}
_WINDOWS = {"initial_stream_window_size": 65536, "initial_connection_window_size": 1048576}


class Fields:
    """What a resource says, field by field."""

    def __init__(self, resource: Mapping[str, Any]) -> None:
        self._left = copy.deepcopy(dict(resource))

    def take(self, path: str) -> Any:
        """The field at ``timeout.http.requestTimeout``, which is then gone.

        Raises:
            KeyError: there is none.
        """
        *outer, last = path.split(".")
        fields = self._left
        for name in outer:
            fields = fields[name]
        return fields.pop(last)

    def find(self, path: str) -> Any:
        """The same; None where there is none."""
        try:
            return self.take(path)
        except KeyError:
            return None

    def end(self) -> None:
        """All must have been taken by now.

        Raises:
            ValueError: these were not.
        """
        if unknown := list(_leaves(self._left)):
            raise ValueError(f"Envoy Gateway has no field {', '.join(unknown)}")


def _leaves(fields: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield path + name


def bootstrap(
    resources: Sequence[Mapping[str, Any]],
    listen: str,
    admin: str,
    replicas: Sequence[str],
    routers: Sequence[str],
) -> dict[str, Any]:
    """The whole configuration of an Envoy; addresses are ``ip:port``.

    Raises:
        ValueError: a resource has a field that is not known here.
        KeyError: a resource, or a field that is needed, is missing.
    """
    said = {one["kind"]: Fields(one["spec"]) for one in resources}
    (extension,) = said["EnvoyExtensionPolicy"].take("extProc")
    said["extProc"] = Fields(extension)
    listener = _listener(
        said["ClientTrafficPolicy"],
        listen,
        asks=_ext_proc(said["extProc"]),
        action=_route_action(said["BackendTrafficPolicy"]),
    )
    clusters = [
        _replicas(said["BackendTrafficPolicy"], replicas),
        _router(said["extProc"], routers),
    ]
    _check_names(said)
    for fields in said.values():
        fields.end()
    return {
        "admin": {"address": socket_address(admin)},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


def _check_names(said: Mapping[str, Fields]) -> None:
    """Policies must be about that Gateway and that route, backends the two Services."""
    api = "gateway.networking.k8s.io"
    gateway = {"group": api, "kind": "Gateway", "name": "eg"}
    route = {"group": api, "kind": "HTTPRoute", "name": "vllm"}
    assert said["ClientTrafficPolicy"].take("targetRefs") == [gateway]
    assert said["BackendTrafficPolicy"].take("targetRefs") == [route]
    assert said["EnvoyExtensionPolicy"].take("targetRefs") == [route]
    assert said["extProc"].take("backendRefs") == [{"name": "router", "port": 50051}]
    assert said["HTTPRoute"].take("parentRefs") == [{"name": "eg"}]
    (rule,) = said["HTTPRoute"].take("rules")
    assert rule == {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [{"name": "vllm", "port": 8000}],
    }


def _listener(
    said: Fields, address: str, asks: Mapping[str, Any], action: Mapping[str, Any]
) -> dict[str, Any]:
    assert said.take("headers.requestID") == "PreserveOrGenerate"
    early = "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"
    removed = [{"remove": name} for name in said.take("headers.earlyRequestHeaders.remove")]
    manager = {
        "@type": f"{_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http-10080",
        "common_http_protocol_options": {"headers_with_underscores_action": "REJECT_REQUEST"},
        "http2_protocol_options": {"max_concurrent_streams": 100, **_WINDOWS},
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "merge_slashes": True,
        "normalize_path": True,
        "path_with_escaped_slashes_action": "UNESCAPE_AND_REDIRECT",
        "server_header_transformation": "PASS_THROUGH",
        "use_remote_address": True,
        "early_header_mutation_extensions": [
            {
                "name": "envoy.http.early_header_mutation.header_mutation",
                "typed_config": {"@type": f"{_TYPES}.{early}", "mutations": removed},
            }
        ],
        "http_filters": [
            {"name": _EXT_PROC, "disabled": True, "typed_config": asks},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": f"{_FILTERS}.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            },
        ],
        "route_config": _routes(action),
    }
    return {
        "name": "default/eg/http",
        "address": socket_address(address),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
        "per_connection_buffer_limit_bytes": _bytes(said.take("connection.bufferLimit")),
        "max_connections_to_accept_per_socket_event": 1,
    }


def _routes(action: Mapping[str, Any]) -> dict[str, Any]:
    route = {
        "name": "httproute/default/vllm/rule/0/match/0/*",
        "match": {"prefix": "/"},
        "route": action,
        "typed_per_filter_config": {
            _EXT_PROC: {"@type": f"{_TYPES}.config.route.v3.FilterConfig", "config": {}}
        },
    }
    host = {"name": "default/eg/http/*", "domains": ["*"], "routes": [route]}
    return {
        "name": "default/eg/http",
        "ignore_port_in_host_matching": True,
        "virtual_hosts": [host],
    }


def _route_action(said: Fields) -> dict[str, Any]:
    kind = "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    return {
        "cluster": _REPLICAS,
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "timeout": _seconds(said.take("timeout.http.requestTimeout")),
        "idle_timeout": _seconds(said.take("timeout.http.streamIdleTimeout")),
        "retry_policy": {
            "num_retries": said.take("retry.numRetries"),
            "retry_on": ",".join(said.take("retry.retryOn.triggers")),
            "retriable_status_codes": said.take("retry.retryOn.httpStatusCodes"),
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {"@type": f"{_TYPES}.{kind}"},
                }
            ],
            "host_selection_retry_max_attempts": 5,
        },
    }


def _ext_proc(said: Fields) -> dict[str, Any]:
    request = Fields(said.take("processingMode.request"))
    response = Fields(said.take("processingMode.response"))
    filter = {
        "@type": f"{_FILTERS}.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {
            "envoy_grpc": {"cluster_name": _ROUTER, "authority": "router.default:50051"},
            "timeout": "10s",
        },
        "failure_mode_allow": said.take("failOpen"),
        "message_timeout": _seconds(said.take("messageTimeout")),
        "processing_mode": {**_mode("request", request), **_mode("response", response)},
        "allow_mode_override": said.take("processingMode.allowModeOverride"),
        "response_attributes": response.take("attributes"),
        "metadata_options": {
            "receiving_namespaces": {"untyped": said.take("metadata.writableNamespaces")}
        },
    }
    request.end()
    response.end()
    return filter


def _mode(way: str, said: Fields) -> dict[str, Any]:
    body = said.find("body")
    return {
        f"{way}_header_mode": "SEND",
        f"{way}_body_mode": _BODY_MODES[body] if body else "NONE",
        f"{way}_trailer_mode": "SEND" if body == "FullDuplexStreamed" else "SKIP",
    }


def _replicas(said: Fields, members: Sequence[str]) -> dict[str, Any]:
    assert said.take("loadBalancer.type") == "LeastRequest"
    sources = said.take("loadBalancer.endpointOverride.extractFrom")
    override = {"override_host_sources": sources, "fallback_policy": _policy("least_request")}
    idle = {"idle_timeout": _seconds(said.take("timeout.http.connectionIdleTimeout"))}
    passive = "healthCheck.passive"
    return {
        **_cluster(_REPLICAS, said, members),
        "load_balancing_policy": _policy("override_host", override),
        "circuit_breakers": {
            "thresholds": [
                _breakers(said) | {"max_retries": said.take("circuitBreaker.maxParallelRetries")}
            ]
        },
        "outlier_detection": {
            "base_ejection_time": _seconds(said.take(f"{passive}.baseEjectionTime")),
            "consecutive_5xx": 5,
            "interval": _seconds(said.take(f"{passive}.interval")),
            "max_ejection_percent": said.take(f"{passive}.maxEjectionPercent"),
        },
        "typed_extension_protocol_options": _http(
            {"http_protocol_options": {}}, {"common_http_protocol_options": idle}
        ),
    }


def _router(said: Fields, members: Sequence[str]) -> dict[str, Any]:
    settings = Fields(said.take("backendSettings"))
    active, passive = "healthCheck.active", "healthCheck.passive"
    assert settings.take(f"{active}.type") == "GRPC"
    cluster = {
        **_cluster(_ROUTER, settings, members),
        "load_balancing_policy": _policy("least_request"),
        "circuit_breakers": {"thresholds": [_breakers(settings) | {"max_retries": 1024}]},
        "common_lb_config": {
            "healthy_panic_threshold": {"value": settings.take("healthCheck.panicThreshold")}
        },
        "health_checks": [
            {
                "timeout": _seconds(settings.take(f"{active}.timeout")),
                "interval": _seconds(settings.take(f"{active}.interval")),
                "unhealthy_threshold": settings.take(f"{active}.unhealthyThreshold"),
                "healthy_threshold": settings.take(f"{active}.healthyThreshold"),
                "grpc_health_check": {},
            }
        ],
        "outlier_detection": {
            "base_ejection_time": _seconds(settings.take(f"{passive}.baseEjectionTime")),
            "consecutive_5xx": 5,
            "consecutive_gateway_failure": settings.take(f"{passive}.consecutiveGatewayErrors"),
            "consecutive_local_origin_failure": 5,
            "enforcing_consecutive_gateway_failure": 100,
            "interval": _seconds(settings.take(f"{passive}.interval")),
            "max_ejection_percent": settings.take(f"{passive}.maxEjectionPercent"),
        },
        "typed_extension_protocol_options": _http({"http2_protocol_options": _WINDOWS}),
    }
    settings.end()
    return cluster


def _cluster(name: str, said: Fields, members: Sequence[str]) -> dict[str, Any]:
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": _seconds(said.take("timeout.tcp.connectTimeout")),
        "per_connection_buffer_limit_bytes": _bytes(said.take("connection.bufferLimit")),
        "ignore_health_on_host_removal": True,
        "upstream_connection_options": {
            "tcp_keepalive": {
                "keepalive_time": int(_seconds(said.take("tcpKeepalive.idleTime"))[:-1]),
                "keepalive_interval": int(_seconds(said.take("tcpKeepalive.interval"))[:-1]),
                "keepalive_probes": said.take("tcpKeepalive.probes"),
            }
        },
        "load_assignment": {"cluster_name": name, "endpoints": endpoints(members)},
    }


def _breakers(said: Fields) -> dict[str, Any]:
    return {
        "max_connections": said.take("circuitBreaker.maxConnections"),
        "max_pending_requests": said.take("circuitBreaker.maxPendingRequests"),
        "max_requests": said.take("circuitBreaker.maxParallelRequests"),
    }


def _http(explicit: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {"@type": f"type.googleapis.com/{name}", "explicit_http_config": explicit}
    return {name: options | dict(more or {})}


def _policy(name: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    message = "".join(word.capitalize() for word in name.split("_"))
    kind = f"{_TYPES}.extensions.load_balancing_policies.{name}.v3.{message}"
    extension = {
        "name": f"envoy.load_balancing_policies.{name}",
        "typed_config": {"@type": kind, **(config or {})},
    }
    return {"policies": [{"typed_extension_config": extension}]}


def _bytes(quantity: str) -> int:
    return int(quantity.removesuffix("Mi")) * 2**20


def _seconds(duration: str) -> str:
    """As protobuf writes one; the API has hours and milliseconds too, but no fractions."""
    for unit, factor in (("ms", 0.001), ("h", 3600), ("s", 1)):
        if duration.endswith(unit):
            return f"{int(duration.removesuffix(unit)) * factor:g}s"
    raise ValueError(f"no duration of Gateway API: {duration!r}")
