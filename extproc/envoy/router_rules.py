"""Rules for what Envoy must know of the router, by how that is configured."""

from datetime import timedelta

from extproc.envoy.envoy_file import EXT_PROC, OVERRIDE_HOST, EnvoyFile
from extproc.envoy.finding import Level
from extproc.envoy.rules import (
    Rule,
    bodies_first,
    is_body_first,
    lacking,
    mode,
    namespaces,
    seconds,
)
from extproc.envoy.tree import MANAGER, Node
from extproc.proxy.messages import PRIORITY, RANK, TOLD_NAMESPACE, expression_of

_TLS = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"


def _encrypted(file: EnvoyFile) -> list[Node]:
    """Clusters of which one end speaks TLS, but for those whose members choose the transport, as
    meshes let them."""
    clusters = [one for one in file.router_clusters if not one["transport_socket_matches"]]
    return [one for one in clusters if _router_tls(file) or file.all(_TLS, one)]


def _router_tls(file: EnvoyFile) -> bool:
    return file.config.serve.tls_cert is not None


def _misses_tls(cluster: Node, file: EnvoyFile) -> str:
    if not file.all(_TLS, cluster):
        return (
            "plain text, and the router TLS (serve.tls_cert): no request would reach it. Give the "
            "cluster a transport_socket (docs/envoy.md, TLS to the router)"
        )
    if not _router_tls(file):
        return (
            "TLS, and the router as it is configured here plain text: no request would reach it. "
            "Set serve.tls_cert and serve.tls_key, or name their file with --config"
        )
    return ""


def _waits_too_briefly(filter: Node, file: EnvoyFile) -> str:
    longest_s, allowed = file.config.hold.longest_s, filter["max_message_timeout"] or timedelta()
    if allowed.total_seconds() >= longest_s:
        return ""
    return (
        f"max_message_timeout is {seconds(allowed)} s: where replicas are full, requests do not "
        "wait at the router but in the replicas, which compute some of them twice. Write "
        f"max_message_timeout: {longest_s:g}s (hold.longest_s)"
    )


def _loses_headers(manager: Node, file: EnvoyFile) -> str:
    named = sorted(name for name in file.config.headers if "_" in name)
    action = manager["common_http_protocol_options"]["headers_with_underscores_action"]
    if not named or action == "ALLOW":
        return ""
    return (
        f"headers_with_underscores_action is {action}, and the router's settings name "
        f"{', '.join(named)}: what clients send by such a name never arrives. Take a name with '-'"
    )


# A table: a formatter would give each of its fields a line.
# fmt: off
ROUTER_RULES = (
    Rule("transport_fits", Level.WARNING, _encrypted,
        "Envoy and the router speak TLS.",
        _misses_tls,
        "cluster {node[name]!r} speaks {}"),
    Rule("waits_for_room", Level.WARNING,
        lambda file: [
            filter
            for filter in (file.filters if file.config.hold.longest_s else [])
            if mode(filter, "request_body") != "FULL_DUPLEX_STREAMED"
        ],
        "A request may wait at the router while every replica is full.",
        _waits_too_briefly,
        "{}"),
    Rule("one_replica_is_named", Level.ERROR,
        lambda file: [one for one in file.replica_clusters if not file.all(OVERRIDE_HOST, one)],
        "The router names one replica alone to a cluster that takes no list.",
        lambda _, file: file.config.serve.second_choice,
        "cluster {node[name]!r} takes one address, and the router as it is configured here names "
        "two: no request would go where it says. Set serve.second_choice: false, or name the file "
        "that does with --config"),
    Rule("decision_metadata_is_taken", Level.WARNING,
        lambda file: file.filters if file.config.serve.decision_metadata else [],
        "Envoy takes what the router tells of decisions, for serve.decision_metadata.",
        lambda filter, _: TOLD_NAMESPACE not in namespaces(filter),
        "what the router tells of its decisions (serve.decision_metadata) is dropped. Add "
        f"{TOLD_NAMESPACE} to metadata_options.receiving_namespaces.untyped"),
    Rule("named_headers_arrive", Level.ERROR,
        lambda file: [
            manager
            for manager in (file.all(MANAGER) if file.config.headers else [])
            if file.all(EXT_PROC, manager)
        ],
        "Envoy lets the headers through that the router's settings name.",
        _loses_headers,
        "{}"),
    Rule("named_headers_are_told", Level.ERROR,
        lambda file: bodies_first(file) if file.config.headers else [],
        "The router hears the headers that its settings name.",
        lambda filter, file: lacking(
            sorted(map(expression_of, file.config.headers)), filter["request_attributes"]
        ),
        "request_header_mode is SKIP and request_attributes lacks headers that the router's "
        "settings name, so that they have no effect. Add {}"),
    Rule("forged_priority_is_removed", Level.WARNING,
        lambda file: bodies_first(file) if file.config.hold.has_priorities else [],
        "Clients cannot choose the order in which replicas take requests: their header goes.",
        lambda filter, file: not file.removes_before(filter, PRIORITY),
        f"nothing removes the header {PRIORITY} that a client sends, and vLLM prefers it to the "
        "priority that the router writes into bodies. Put into the HttpConnectionManager what "
        "envoy/envoy.yaml has under early_header_mutation_extensions"),
    Rule("forged_rank_is_removed", Level.WARNING,
        lambda file: [
            manager
            for manager in file.all(MANAGER)
            if any(map(is_body_first, file.all(EXT_PROC, manager)))
        ],
        "Clients cannot choose an engine of a data-parallel replica: their header goes.",
        lambda manager, file: (
            not all(file.removes_before(filter, RANK) for filter in file.all(EXT_PROC, manager))
        ),
        f"nothing removes the header {RANK} that a client sends, and vLLM takes the engine that it "
        "names, however busy. Put into the HttpConnectionManager what envoy/envoy.yaml has under "
        "early_header_mutation_extensions"),
)
# fmt: on
