"""Rules on clusters, and on the listeners and routes in front of them."""

from datetime import timedelta

from extproc.envoy.envoy_file import (
    BUFFER,
    EXT_PROC,
    OVERRIDE_HOST,
    EnvoyFile,
    clusters_of,
    destination,
    sources,
)
from extproc.envoy.finding import Level
from extproc.envoy.rules import (
    DEFAULT_BUFFER,
    Rule,
    is_body_first,
    is_full_duplex,
    seconds,
    wanted_sources,
)
from extproc.envoy.tree import CLUSTER, LISTENER, MANAGER, ROUTE, Node
from extproc.proxy.messages import DESTINATION
from extproc.proxy.messages import METADATA_NAMESPACE as NAMESPACE

# Circuit breakers, and their defaults.
_LIMITS = {"max_connections": 1024, "max_pending_requests": 1024, "max_requests": 1024}
_RETRY_LIMIT = {"max_retries": 3}
_RETRY_POLICY = (
    '{{retry_on: "connect-failure,refused-stream,reset,retriable-status-codes", '
    "retriable_status_codes: [500, 502, 503], num_retries: 1}}"
)
_SHORT_ROUTE = timedelta(minutes=10)
_SHORT_WAIT = timedelta(minutes=1)
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_TLS = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"


def _candidates(file: EnvoyFile) -> list[Node]:
    """The replicas' clusters or, where none obeys the router, all that could be meant."""
    routers = {cluster.path for cluster in file.router_clusters}
    others = [cluster for cluster in file.all(CLUSTER) if cluster.path not in routers]
    return file.replica_clusters or others


def _by_route(file: EnvoyFile) -> bool:
    """Routes to the replicas all have an idle timeout of their own."""
    routes = file.replica_routes
    return bool(routes) and all("idle_timeout" in route for route in routes)


def _one_alone(file: EnvoyFile) -> list[Node]:
    """The replicas' clusters that take one address: the policy override_host takes a list."""
    return [one for one in file.replica_clusters if not file.all(OVERRIDE_HOST, one)]


def _names_second(file: EnvoyFile) -> bool:
    named = file.config.serve.second_choice
    return not all(map(is_full_duplex, file.filters)) if named is None else named


def _with_second(file: EnvoyFile) -> list[Node]:
    """Routes on which a second choice can be used."""
    others = {one["name"] for one in _one_alone(file)}
    return [route for route in file.replica_routes if not clusters_of(route) & others]


def _leads_elsewhere(route: Node, file: EnvoyFile) -> str:
    obeying = {cluster["name"] for cluster in file.replica_clusters}
    named = clusters_of(route)
    others = sorted(named & file.cluster_names - obeying)

    def may_obey(other: Node) -> bool:
        return not clusters_of(other) or bool(clusters_of(other) & obeying)

    if not others or (not named & obeying and any(map(may_obey, file.all(ROUTE)))):
        return ""
    return (
        f"the route leads to {', '.join(map(repr, others))}, which ignores the router's choice: it "
        f"has no policy override_host. Write cluster: {', '.join(sorted(map(repr, obeying)))}, "
        "which has it, or give load_balancing_policy: override_host to this one"
    )


def _low_limits(cluster: Node, file: EnvoyFile) -> str:
    thresholds = cluster["circuit_breakers"]["thresholds"]
    default = [one for one in thresholds if one["priority"] == "DEFAULT"]
    budget = any("retry_budget" in one for one in default)
    retried = file.all(OVERRIDE_HOST, cluster) and not budget
    return ", ".join(
        f"{name} ({limit})"
        for name, limit in (_LIMITS | _RETRY_LIMIT if retried else _LIMITS).items()
        if max((one[name] or 0 for one in default), default=0) <= limit
    )


def _cuts_answers(route: Node, _: EnvoyFile) -> str:
    if (timeout := route["timeout"]) is None:
        return "Envoy's default of 15 s"
    return f"{seconds(timeout)} s" if timedelta() < timeout < _SHORT_ROUTE else ""


def _cuts_waiting(node: Node, _: EnvoyFile) -> str:
    name = "stream_idle_timeout" if node.kind == MANAGER else "idle_timeout"
    timeout = node[name]
    if not timeout or timeout >= _SHORT_WAIT:
        return ""
    return (
        f"{name} is {seconds(timeout)} s: a request that waits longer for its first token is cut. "
        f"Write {name}: 3600s"
    )


def _leaves_second(route: Node, _: EnvoyFile) -> str:
    policy = route["retry_policy"]
    if policy and policy["num_retries"] == 0:
        return (
            "num_retries is 0: nothing is tried again, and requests to a replica that just died "
            "fail, though the router names a second choice. Write num_retries: 1"
        )
    if "connect-failure" in policy["retry_on"]:
        return ""
    return (
        "no retry on connect-failure: requests to a replica that just died fail, though the router "
        f"names a second choice. Write retry_policy: {_RETRY_POLICY.format()}"
    )


def _leaves_failures(route: Node, _: EnvoyFile) -> bool:
    policy = route["retry_policy"]
    if "retry_policy" not in route or policy["num_retries"] == 0:
        return False  # nothing is retried: second_choice_is_used says so
    conditions = {one.strip() for one in policy["retry_on"].split(",")}
    listed = "retriable-status-codes" in conditions and 500 in policy["retriable_status_codes"]
    return "5xx" not in conditions and not listed


def _misses_tls(cluster: Node, file: EnvoyFile) -> str:
    if not file.all(_TLS, cluster):
        return (
            "plain text, and the router TLS (serve.tls_cert): no request would reach it. Give the "
            "cluster a transport_socket (docs/envoy.md, TLS to the router)"
        )
    if file.config.serve.tls_cert is None:
        return (
            "TLS, and the router as it is configured here plain text: no request would reach it. "
            "Set serve.tls_cert and serve.tls_key, or name their file with --config"
        )
    return ""


# A table: a formatter would give each of its fields a line.
# fmt: off
CLUSTER_RULES = (
    Rule("routes_lead_to_replicas", Level.ERROR,
        lambda file: file.all(ROUTE) if file.replica_clusters else [],
        "Requests reach the cluster that obeys the router: a route leads to it.",
        _leads_elsewhere),
    Rule("routes_ask", Level.ERROR, lambda file: file.replica_routes,
        "Requests to the replicas pass the ext_proc filter: no route or virtual host disables it.",
        lambda route, file: not file.passes(EXT_PROC, route)
            and any(map(file.is_enabled, file.all(EXT_PROC))),
        "the ext_proc filter is disabled for this route: its requests never ask the router. Remove "
        "disabled: true from typed_per_filter_config of the route, its virtual host and its "
        "weighted clusters, or enable the filter there with overrides: {{}}"),
    Rule("routes_wait", Level.ERROR,
        lambda file: [one for one in file.replica_routes
            if file.passes(EXT_PROC, one) and any(map(is_body_first, file.filters_of(one)))],
        "Where the body comes first, requests are held until it was seen: no route disables that.",
        lambda route, file: not file.passes(BUFFER, route),
        "the filter envoy.filters.http.buffer is disabled for this route, and request_header_mode "
        "is SKIP: its requests leave before their body was seen. Remove disabled: true, or "
        "override ext_proc's processing_mode there with request_header_mode: SEND"),
    Rule("replicas_obey", Level.ERROR, _candidates,
        "Requests go where the router says: the replicas' cluster obeys it.",
        lambda cluster, file: cluster not in file.replica_clusters and wanted_sources(file),
        "cluster {node[name]!r} ignores the router's choice. Write load_balancing_policy: "
        "override_host with override_host_sources: {}"),
    Rule("no_header_chooses_any_address", Level.ERROR, _candidates,
        "No header of a client can send a request to any address.",
        lambda cluster, _: destination(cluster) == "header",
        "cluster {node[name]!r} goes wherever a header says (use_http_header). Write metadata_key: "
        f"{{{{key: {NAMESPACE}, path: [{{{{key: {DESTINATION}}}}}]}}}}, which no client sets"),
    Rule("goes_on_without_router", Level.WARNING, _candidates,
        "Requests are served while the router is down: the cluster has members of its own.",
        lambda cluster, _: destination(cluster) == "metadata",
        "cluster {node[name]!r} is ORIGINAL_DST: it answers 503 while the router is down, and "
        "always to requests that make no replica compute (GET /v1/models, POST /tokenize), for "
        "which the router names none. Where the replicas' addresses are known, write type: "
        "STRICT_DNS (or STATIC, EDS) and load_balancing_policy: override_host"),
    Rule("source_is_known", Level.ERROR, lambda file: file.all(OVERRIDE_HOST),
        "The policy override_host reads what the router sets.",
        lambda policy, file: not sources(policy) and wanted_sources(file),
        "override_host_sources names nothing that the router sets. "
        "Write override_host_sources: {}"),
    Rule("has_fallback", Level.ERROR, lambda file: file.all(OVERRIDE_HOST),
        "Requests are served while the router is down: override_host has a fallback policy.",
        lambda policy, _: not policy["fallback_policy"]["policies"],
        "override_host has no fallback_policy: requests fail while the router is down. "
        "Write fallback_policy with envoy.load_balancing_policies.least_request"),
    Rule("members_are_addresses", Level.ERROR, lambda file: file.replica_clusters,
        "Every replica is a member of its cluster under its own ip:port.",
        lambda one, _: one["type"] in ("LOGICAL_DNS", "ORIGINAL_DST") and not destination(one),
        "cluster {node[name]!r} is {node[type]}: the ip:port that the router names is no member of "
        "it, and the choice is ignored. Write type: STRICT_DNS, STATIC or EDS"),
    Rule("router_speaks_http2", Level.ERROR, lambda file: file.router_clusters,
        "Envoy speaks HTTP/2 to the router, as gRPC needs.",
        lambda cluster, file: "http2_protocol_options" not in cluster and not any(
            "http2_protocol_options" in options["explicit_http_config"]
            for options in file.all(_HTTP_OPTIONS, cluster)
        ),
        "cluster {node[name]!r} speaks HTTP/1.1: gRPC needs HTTP/2. Write "
        "explicit_http_config: {{http2_protocol_options: {{}}}} in its HttpProtocolOptions"),
    Rule("router_is_health_checked", Level.WARNING, lambda file: file.router_clusters,
        "A router that hangs is left out: Envoy checks its health.",
        lambda cluster, _: not cluster["health_checks"],
        "cluster {node[name]!r} has no health_checks: while a router hangs, requests wait for it, "
        "each for the whole message_timeout. Write health_checks with grpc_health_check: {{}}"),
    Rule("limits_are_raised", Level.WARNING,
        lambda file: file.router_clusters + file.replica_clusters,
        "Circuit breakers let all requests in flight through.",
        _low_limits,
        "cluster {node[name]!r} takes no more than Envoy's default in {}: every request in flight "
        "counts, and those beyond are refused, not retried or not routed. Raise them in "
        "circuit_breakers, for example to 100000 (max_retries: 1000)"),
    Rule("vanished_replicas_are_hung_up_on", Level.WARNING, _candidates,
        "A replica whose machine vanished is hung up on.",
        lambda cluster, _: "tcp_keepalive" not in cluster["upstream_connection_options"],
        "cluster {node[name]!r} has no tcp_keepalive: requests on a replica whose machine vanished "
        "last as long as clients wait. Write upstream_connection_options: {{tcp_keepalive: "
        "{{keepalive_time: 10, keepalive_interval: 5, keepalive_probes: 3}}}}, and for those sent "
        "to it later upstream_bind_config: {{socket_options: [{{level: 6, name: 18, int_value: "
        "25000}}]}} (Linux's TCP_USER_TIMEOUT)"),
    Rule("large_bodies_pass", Level.WARNING,
        lambda file: [one for one in file.all(LISTENER) if file.all(EXT_PROC, one)]
            or file.all(LISTENER),  # the filter is in none: a fragment
        "Bodies larger than 1 MiB are accepted.",
        lambda one, _: (one["per_connection_buffer_limit_bytes"] or 0) <= DEFAULT_BUFFER,
        "per_connection_buffer_limit_bytes is 1 MiB or less: a larger body, such as one with an "
        "image, gets 413. Write per_connection_buffer_limit_bytes: 67108864"),
    Rule("answers_may_be_long", Level.ERROR, lambda file: file.replica_routes,
        "No route timeout cuts a long answer.",
        _cuts_answers,
        "the route's timeout is {}: longer answers are cut. Write timeout: 0s"),
    Rule("answers_may_be_silent", Level.WARNING, lambda file: file.all(MANAGER),
        "No idle timeout cuts a request that waits in a replica's queue.",
        lambda manager, file: "stream_idle_timeout" not in manager and not _by_route(file),
        "stream_idle_timeout is Envoy's default of 5 min: an answer that is queued or not streamed "
        "for longer is cut. Write stream_idle_timeout: 3600s"),
    Rule("first_tokens_may_wait", Level.ERROR,
        lambda file: [*([] if _by_route(file) else file.all(MANAGER)), *file.replica_routes],
        "No short idle timeout cuts a request that waits for its first token.",
        _cuts_waiting),
    Rule("second_choice_is_used", Level.WARNING, _with_second,
        "A request to a replica that just died is tried again on the second choice.",
        _leaves_second),
    Rule("failures_are_retried", Level.WARNING, _with_second,
        "A request that a broken replica answers with 500 is tried again on the second choice.",
        _leaves_failures,
        "no retry on status 500: until the router has left out a replica that fails, its failures "
        f"reach clients. Write retry_policy: {_RETRY_POLICY}"),
    Rule("transport_fits", Level.WARNING,
        lambda file: [one for one in file.router_clusters
            if (file.config.serve.tls_cert or file.all(_TLS, one))
            and not one["transport_socket_matches"]],  # by which meshes let members choose
        "Envoy and the router speak TLS.",
        _misses_tls,
        "cluster {node[name]!r} speaks {}"),
    Rule("one_replica_is_named", Level.ERROR, _one_alone,
        "The router names one replica alone to a cluster that takes no list.",
        lambda _, file: _names_second(file),
        "cluster {node[name]!r} takes one address, and the router as it is configured here names "
        "two: no request would go where it says. Set serve.second_choice: false, or name the file "
        "that does with --config"),
)
# fmt: on
