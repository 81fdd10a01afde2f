"""Rules for what Envoy must know of the router, by how that is configured."""

from collections import defaultdict
from datetime import timedelta

from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.core.v3 import HttpProtocolOptions
from envoy_data_plane.envoy.config.core.v3 import (
    HttpProtocolOptionsHeadersWithUnderscoresAction as Underscores,
)
from envoy_data_plane.envoy.config.endpoint.v3 import Endpoint
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExternalProcessor
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import OverrideHost
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import UpstreamTlsContext

from extproc.envoy.envoy_file import EnvoyFile
from extproc.envoy.file import Part
from extproc.envoy.finding import Level
from extproc.envoy.rules import (
    Rule,
    bodies_first,
    is_full_duplex,
    receiving,
    rule,
    skips_responses,
)
from extproc.proxy.messages import PRIORITY, TOLD_NAMESPACE, UNSEEN, expression_of

ROUTER_RULES: list[Rule] = []


def _of_several(file: EnvoyFile) -> list[Part[Cluster]]:
    """Clusters that list their members, where a router is several processes."""
    clusters = file.router_clusters if file.config.serve.workers > 1 else []
    return [part for part in clusters if _ports(part, file)]


@rule(Level.WARNING, _of_several, ROUTER_RULES)
def workers_are_listed(part: Part[Cluster], file: EnvoyFile) -> str | None:
    """All workers of the router are listed."""
    workers, ports = file.config.serve.workers, min(_ports(part, file), key=len)
    if len(ports) >= workers:
        return None
    return (
        f"cluster {part.message.name!r} lists {len(ports)} of {workers} workers (serve.workers): "
        f"the others get no request. List the ports {min(ports)} to {min(ports) + workers - 1}, "
        "each as an endpoint"
    )


def _encrypted(file: EnvoyFile) -> list[Part[Cluster]]:
    """Clusters of which one end speaks TLS, but for those whose members choose the transport, as
    meshes let them."""
    clusters = [one for one in file.router_clusters if not one.message.transport_socket_matches]
    return [one for one in clusters if _router_tls(file) or _envoy_tls(one, file)]


@rule(Level.WARNING, _encrypted, ROUTER_RULES)
def transport_fits(part: Part[Cluster], file: EnvoyFile) -> str | None:
    """Envoy and the router speak TLS."""
    if not _envoy_tls(part, file):
        return (
            f"cluster {part.message.name!r} speaks plain text, and the router TLS "
            "(serve.tls_cert): no request would reach it. Give the cluster a transport_socket "
            "(docs/envoy.md, TLS to the router)"
        )
    if not _router_tls(file):
        return (
            f"cluster {part.message.name!r} speaks TLS, and the router as it is configured here "
            "plain text: no request would reach it. Set serve.tls_cert and serve.tls_key, or name "
            "their file with --config"
        )
    return None


@rule(
    Level.ERROR,
    lambda file: file.filters if file.config.route.answer_asked_name else [],
    ROUTER_RULES,
)
def every_answer_is_shown(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """The router is shown every answer, for route.answer_asked_name."""
    if not skips_responses(part):
        return None
    return (
        "response_header_mode is SKIP, and with route.answer_asked_name the router needs every "
        "answer: these have the replica's name. Leave out the filters local_ratelimit and "
        f"set_filter_state, and this route, which matches their mark {UNSEEN}"
    )


def _timed(file: EnvoyFile) -> list[Part[ExternalProcessor]]:
    """Filters in which Envoy counts the time that requests wait for the router."""
    filters = file.filters if file.config.hold.longest_s else []
    return [one for one in filters if not is_full_duplex(one)]


@rule(Level.WARNING, _timed, ROUTER_RULES)
def waits_for_room(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """A request may wait at the router while every replica is full."""
    longest_s = file.config.hold.longest_s
    allowed_s = (part.message.max_message_timeout or timedelta()).total_seconds()
    if allowed_s >= longest_s:
        return None
    return (
        f"max_message_timeout is {allowed_s:g} s: where replicas are full, requests do not wait at "
        "the router but in the replicas, which compute some of them twice. Write "
        f"max_message_timeout: {longest_s:g}s (hold.longest_s)"
    )


def _without_list(file: EnvoyFile) -> list[Part[Cluster]]:
    """Clusters that take no list."""
    return [one for one in file.replica_clusters if not file.all(OverrideHost, within=one)]


@rule(Level.ERROR, _without_list, ROUTER_RULES)
def one_replica_is_named(part: Part[Cluster], file: EnvoyFile) -> str | None:
    """The router names one replica alone to a cluster that takes no list."""
    if not file.config.serve.second_choice:
        return None
    return (
        f"cluster {part.message.name!r} takes one address, and the router as it is configured here "
        "names two: no request would go where it says. Set serve.second_choice: false, or name the "
        "file that does with --config"
    )


@rule(
    Level.WARNING,
    lambda file: file.filters if file.config.serve.decision_metadata else [],
    ROUTER_RULES,
)
def decision_metadata_is_taken(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """Envoy takes what the router tells of decisions, for serve.decision_metadata."""
    if TOLD_NAMESPACE in receiving(part.message):
        return None
    return (
        "what the router tells of its decisions (serve.decision_metadata) is dropped. Add "
        f"{TOLD_NAMESPACE} to metadata_options.receiving_namespaces.untyped"
    )


def _asking(file: EnvoyFile) -> list[Part[HttpConnectionManager]]:
    """Those in which requests pass an ext_proc filter, where settings name headers."""
    managers = file.all(HttpConnectionManager) if file.config.headers else []
    return [one for one in managers if file.all(ExternalProcessor, within=one)]


@rule(Level.ERROR, _asking, ROUTER_RULES)
def named_headers_arrive(part: Part[HttpConnectionManager], file: EnvoyFile) -> str | None:
    """Envoy lets the headers through that the router's settings name."""
    named = sorted(name for name in file.config.headers if "_" in name)
    options = part.message.common_http_protocol_options or HttpProtocolOptions()
    action = options.headers_with_underscores_action
    if not named or action is Underscores.ALLOW:
        return None
    return (
        f"headers_with_underscores_action is {action.name}, and the router's settings name "
        f"{', '.join(named)}: what clients send by such a name never arrives. Take a name with '-'"
    )


@rule(Level.ERROR, lambda file: bodies_first(file) if file.config.headers else [], ROUTER_RULES)
def named_headers_are_told(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """The router hears the headers that its settings name."""
    wanted = sorted(map(expression_of, file.config.headers))
    missing = [one for one in wanted if one not in part.message.request_attributes]
    if not missing:
        return None
    return (
        "request_header_mode is SKIP and request_attributes lacks headers that the router's "
        f"settings name, so that they have no effect. Add {', '.join(missing)}"
    )


@rule(
    Level.WARNING,
    lambda file: bodies_first(file) if file.config.hold.has_priorities else [],
    ROUTER_RULES,
)
def forged_priority_is_removed(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """Clients cannot choose the order in which replicas take requests: their header goes."""
    if file.removes_before(part, PRIORITY):
        return None
    return (
        f"nothing removes the header {PRIORITY} that a client sends, and vLLM prefers it to the "
        "priority that the router writes into bodies. Put into the HttpConnectionManager what "
        "envoy/envoy.yaml has under early_header_mutation_extensions"
    )


def _router_tls(file: EnvoyFile) -> bool:
    return file.config.serve.tls_cert is not None


def _envoy_tls(cluster: Part[Cluster], file: EnvoyFile) -> bool:
    return bool(file.all(UpstreamTlsContext, within=cluster))


def _ports(cluster: Part[Cluster], file: EnvoyFile) -> list[set[int]]:
    """The ports listed for each host."""
    ports: defaultdict[str, set[int]] = defaultdict(set)
    for member in (part.message for part in file.all(Endpoint, within=cluster)):
        if member.address and (address := member.address.socket_address):
            ports[address.address].add(address.port_value or 0)
    return [*ports.values()]
