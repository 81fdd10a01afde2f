"""Rules on clusters, as a table."""

from datetime import timedelta
from itertools import starmap

from extproc.envoy.envoy_file import OVERRIDE_HOST, EnvoyFile, destination, sources
from extproc.envoy.finding import Level
from extproc.envoy.rules import Rule, names_second, takes_one_address, wanted_sources
from extproc.envoy.tree import CLUSTER, Node
from extproc.ground.address import is_ip, join_address, split_address
from extproc.proxy.messages import DESTINATION, METADATA_NAMESPACE

# Circuit breakers, and Envoy's defaults.
_LIMITS = {"max_connections": 1024, "max_pending_requests": 1024, "max_requests": 1024}
_RETRY_LIMIT = {"max_retries": 3}
_NO_TRAFFIC_INTERVAL = timedelta(seconds=60)  # Envoy's default
_LATE = timedelta(seconds=10)  # longer intervals get a warning
_DNS = "envoy.extensions.clusters.dns.v3.DnsCluster"  # may stand for STRICT_DNS and LOGICAL_DNS
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_SOCKET = "envoy.config.core.v3.SocketAddress"
_TLS = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"


def _candidates(file: EnvoyFile) -> list[Node]:
    """Return the clusters that follow the router's choice; if none does, all but the router's."""
    others = [cluster for cluster in file.all(CLUSTER) if cluster not in file.router_clusters]
    return file.replica_clusters or others


def _low_limits(cluster: Node, file: EnvoyFile) -> str:
    thresholds = cluster["circuit_breakers"]["thresholds"]
    default = [threshold for threshold in thresholds if threshold["priority"] == "DEFAULT"]
    has_budget = any("retry_budget" in threshold for threshold in default)
    is_retried = file.all(OVERRIDE_HOST, cluster) and not has_budget
    return ", ".join(
        f"{name} ({limit})"
        for name, limit in (_LIMITS | _RETRY_LIMIT if is_retried else _LIMITS).items()
        if max((threshold[name] or 0 for threshold in default), default=0) <= limit
    )


def _starts_late(cluster: Node, _: EnvoyFile) -> bool:
    """Return whether failed first checks keep Envoy from asking any router for a minute."""
    lb_config = cluster["common_lb_config"]
    panics = (
        "healthy_panic_threshold" not in lb_config or lb_config["healthy_panic_threshold"]["value"]
    )
    return not panics and any(
        (check["no_traffic_interval"] or _NO_TRAFFIC_INTERVAL) > _LATE
        for check in cluster["health_checks"]
    )


def _members(file: EnvoyFile, cluster: Node) -> list[tuple[str, int]]:
    """Return host and port of each member that the file lists for a cluster.

    Without ``port_value`` the port is 0, as Envoy reads ``named_port`` in STRICT_DNS clusters.
    """
    members = file.all(_SOCKET, cluster["load_assignment"])
    return [(member["address"], member["port_value"] or 0) for member in members]


def _all_ips(addresses: list[tuple[str, int]]) -> bool:
    return all(is_ip(host) for host, _ in addresses)


def _replicas(file: EnvoyFile) -> list[tuple[str, int]]:
    """Return IP address and port of all configured replicas; empty if the configuration has a name,
    a source in Kubernetes or a file in place of an address."""
    pools = file.config.each_pool
    sources = [source for pool in pools for source in pool.replicas]
    if any(pool.replicas_file for pool in pools) or not all(source.url for source in sources):
        return []
    replicas = [source.host_and_port for source in sources]
    return replicas if _all_ips(replicas) else []


def _listed_replicas(file: EnvoyFile) -> list[Node]:
    """Return the replica clusters whose members can be compared with the configured replicas."""
    clusters = file.replica_clusters if _replicas(file) else []
    return [
        cluster
        for cluster in clusters
        if (members := _members(file, cluster)) and _all_ips(members)
    ]


def _other_members(cluster: Node, file: EnvoyFile) -> str:
    members = _members(file, cluster)
    return "" if {*members} & {*_replicas(file)} else ", ".join(starmap(join_address, members))


def _placeholders(cluster: Node, file: EnvoyFile) -> str:
    return ", ".join(host for host, _ in _members(file, cluster) if host.endswith(".example"))


def _listed_routers(file: EnvoyFile, named: bool) -> list[Node]:
    """Return the routers' clusters that list members: by host name if ``named``, else by address.

    A host name may belong to a Kubernetes Service, which may map the port to another port.
    """
    return [
        cluster
        for cluster in file.router_clusters
        if (members := _members(file, cluster))
        and any(not is_ip(host) and host != "localhost" for host, _ in members) == named
    ]


def _other_ports(cluster: Node, file: EnvoyFile) -> str:
    listens = split_address(file.config.serve.listen)[1]
    if listens in (ports := {port for _, port in _members(file, cluster)}):
        return ""
    listed = ", ".join(map(str, sorted(ports)))
    return f"Envoy connects to port {listed}, and the router listens at {listens}"


def _misses_tls(cluster: Node, file: EnvoyFile) -> str:
    if not file.all(_TLS, cluster):
        return (
            "plain text, but the router speaks TLS (serve.tls_cert): no request reaches it. Give "
            "the cluster a transport_socket (docs/envoy.md, TLS to the router)"
        )
    if file.config.serve.tls_cert is None:
        return (
            "TLS, but this configuration lets the router speak plain text: no request reaches it. "
            "Set serve.tls_cert and serve.tls_key, or name the router's file with --config"
        )
    return ""


# A table: the formatter would give each field a line.
# fmt: off
CLUSTER_RULES = (
    Rule("replica_cluster_obeys", Level.ERROR, _candidates,
        "The replicas' cluster can obey the router: it has override_host, or is ORIGINAL_DST.",
        lambda cluster, file: cluster not in file.replica_clusters and wanted_sources(file),
        "cluster {node[name]!r} ignores the router's choice. Write load_balancing_policy: "
        "override_host with override_host_sources: {}"),
    Rule("no_header_chooses_any_address", Level.ERROR, _candidates,
        "No header of a client can send a request to any address.",
        lambda cluster, _: destination(cluster) == "header",
        "cluster {node[name]!r} goes wherever a header says (use_http_header). Write metadata_key: "
        f"{{{{key: {METADATA_NAMESPACE}, path: [{{{{key: {DESTINATION}}}}}]}}}}, which clients "
        "cannot set"),
    Rule("serves_without_router", Level.WARNING,
        lambda file: _candidates(file) if file.config.serve.steers_all else [],
        "The cluster has members of its own, for requests without a choice.",
        lambda cluster, _: destination(cluster) == "metadata",
        "cluster {node[name]!r} is ORIGINAL_DST: it answers 503 while the router is down, and "
        "always to requests for which the router names no replica (GET /v1/models, POST "
        "/tokenize). If the replicas' addresses are known, write type: STRICT_DNS (or STATIC, "
        "EDS) and load_balancing_policy: override_host"),
    Rule("observed_requests_are_served", Level.ERROR,
        lambda file: _candidates(file) if not file.config.serve.steers_all else [],
        "Requests that the router only observes are served: the cluster chooses a member.",
        lambda cluster, _: destination(cluster) == "metadata",
        "cluster {node[name]!r} is ORIGINAL_DST, and by serve.mode or serve.share the router names "
        "no replica for some requests: they get 503. Set serve.mode: route and serve.share: 1, or "
        "write type: STRICT_DNS (or STATIC, EDS) and load_balancing_policy: override_host"),
    Rule("override_source_is_known", Level.ERROR, lambda file: file.all(OVERRIDE_HOST),
        "The policy override_host reads the router's header or metadata.",
        lambda policy, file: not sources(policy) and wanted_sources(file),
        "override_host_sources names nothing that the router sets. "
        "Write override_host_sources: {}"),
    Rule("has_fallback", Level.ERROR, lambda file: file.all(OVERRIDE_HOST),
        "override_host has a fallback policy, for requests without a choice.",
        lambda policy, _: not policy["fallback_policy"]["policies"],
        "override_host has no fallback_policy: requests fail while the router is down. "
        "Write fallback_policy with envoy.load_balancing_policies.least_request"),
    Rule("members_are_addresses", Level.ERROR, lambda file: file.replica_clusters,
        "Every member of the replicas' cluster has its own ip:port.",
        lambda cluster, file: (
            "a DnsCluster with all_addresses_in_single_endpoint"
            if any(dns["all_addresses_in_single_endpoint"] for dns in file.all(_DNS, cluster))
            else cluster["type"] in ("LOGICAL_DNS", "ORIGINAL_DST")
            and not destination(cluster)
            and cluster["type"]
        ),
        "cluster {node[name]!r} is {}: the ip:port that the router names is not a member "
        "of it, and Envoy ignores the choice. Write type: STRICT_DNS, STATIC or EDS"),
    Rule("placeholder_is_replaced", Level.ERROR,
        lambda file: _candidates(file)
            if any(pool.replicas or pool.replicas_file for pool in file.config.each_pool) else [],
        "No member of the replicas' cluster is a placeholder.",
        _placeholders,
        "cluster {node[name]!r} has the placeholder {}: Envoy finds no replica there. Write the "
        "addresses of your replicas"),
    Rule("members_are_replicas", Level.ERROR, _listed_replicas,
        "The replicas' cluster lists replicas of the router's configuration.",
        _other_members,
        "cluster {node[name]!r} lists {}, and none of the replicas in the router's configuration: "
        "Envoy ignores every choice. Write the same addresses in both files, or name the router's "
        "configuration with --config"),
    Rule("router_speaks_http2", Level.ERROR, lambda file: file.router_clusters,
        "Envoy speaks HTTP/2 to the router, as gRPC needs.",
        lambda cluster, file: "http2_protocol_options" not in cluster and not any(
            "http2_protocol_options" in options["explicit_http_config"]
            for options in file.all(_HTTP_OPTIONS, cluster)
        ),
        "cluster {node[name]!r} speaks HTTP/1.1: gRPC needs HTTP/2. Write "
        "explicit_http_config: {{http2_protocol_options: {{}}}} in its HttpProtocolOptions"),
    Rule("router_is_health_checked", Level.WARNING, lambda file: file.router_clusters,
        "Envoy checks the router's health, and does not ask a router that hangs.",
        lambda cluster, _: not cluster["health_checks"],
        "cluster {node[name]!r} has no health_checks: while a router hangs, each request waits the "
        "whole message_timeout for it. Write health_checks with grpc_health_check: {{}}"),
    Rule("new_router_is_asked_soon", Level.WARNING,
        lambda file: [cluster for cluster in file.router_clusters if cluster["health_checks"]],
        "Envoy soon asks a router that was not yet up at its first health check.",
        _starts_late,
        "cluster {node[name]!r} asks no unhealthy router (healthy_panic_threshold is 0), and "
        "repeats a health check that fails before the first request only after "
        "no_traffic_interval (60 s by default): requests go unrouted until then. Write "
        "no_traffic_interval: 0.5s, or for Envoy Gateway panicThreshold: 1"),
    Rule("limits_are_raised", Level.WARNING,
        lambda file: file.router_clusters + file.replica_clusters,
        "Circuit breakers let all requests in flight through.",
        _low_limits,
        "cluster {node[name]!r} has Envoy's default limit for {}: requests in flight beyond it are "
        "refused, not retried or not routed. Raise it in circuit_breakers, for example to 100000 "
        "(max_retries: 1000)"),
    Rule("vanished_replicas_are_noticed", Level.WARNING, _candidates,
        "Connections to a replica whose machine vanished are closed.",
        lambda cluster, _: "tcp_keepalive" not in cluster["upstream_connection_options"],
        "cluster {node[name]!r} has no tcp_keepalive: requests on a replica whose machine vanished "
        "last as long as clients wait. Write upstream_connection_options: {{tcp_keepalive: "
        "{{keepalive_time: 10, keepalive_interval: 5, keepalive_probes: 3}}}}, and for requests "
        "sent to it later upstream_bind_config: {{socket_options: [{{level: 6, name: 18, "
        "int_value: 25000}}]}} (Linux's TCP_USER_TIMEOUT)"),
    Rule("router_port_matches", Level.ERROR, lambda file: _listed_routers(file, named=False),
        "Envoy connects to the port at which the router listens.",
        _other_ports,
        "cluster {node[name]!r} has {} (serve.listen): no request reaches the router. Correct a "
        "port, or name the router's configuration with --config"),
    Rule("mapped_port_leads_to_router", Level.WARNING,
        lambda file: _listed_routers(file, named=True),
        "Envoy connects by a name to the port at which the router listens.",
        _other_ports,
        "{} (serve.listen): unless a Service maps this port to the router's, no request reaches "
        "it. Correct one of the two ports, or name the router's configuration with --config"),
    Rule("transport_matches", Level.ERROR,
        lambda file: [cluster for cluster in file.router_clusters
            if (file.config.serve.tls_cert or file.all(_TLS, cluster))
            and not cluster["transport_socket_matches"]],  # a mesh chooses TLS for each member
        "Envoy and the router speak TLS.",
        _misses_tls,
        "cluster {node[name]!r} speaks {}"),
    Rule("one_replica_is_named", Level.ERROR, takes_one_address,
        "The router names a single replica to a cluster that takes no list.",
        lambda _, file: names_second(file),
        "cluster {node[name]!r} takes one address, but this configuration lets the router name "
        "two: no request goes where the router says. Set serve.second_choice: false, or name the "
        "router's configuration with --config"),
)
# fmt: on
