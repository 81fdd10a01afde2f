"""The rules: each says in its first line what holds where it finds nothing, and why it matters."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType
from envoy_data_plane.envoy.config.listener.v3 import Listener
from envoy_data_plane.envoy.config.route.v3 import RouteAction
from envoy_data_plane.envoy.extensions.filters.http.buffer.v3 import Buffer
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import OverrideHost
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions

from extproc.envoy.choice import follows_header, is_destination, reads_header, reads_metadata
from extproc.envoy.envoy_file import EnvoyFile, clusters_of, router_cluster
from extproc.envoy.file import Part
from extproc.envoy.finding import Finding, Level
from extproc.proxy.messages import DESTINATION, UNSEEN, expression_of
from extproc.proxy.messages import METADATA_NAMESPACE as NAMESPACE

_HEADERS = ("request.path", "request.headers['content-encoding']")
_ATTRIBUTES = ("upstream.address", "response.code", "response.flags")
_LIMITS = {"max_connections": 1024, "max_pending_requests": 1024, "max_requests": 1024}
"""Circuit breakers and their defaults."""
_RETRY_LIMIT = {"max_retries": 3}
_RETRY_POLICY = (
    '{retry_on: "connect-failure,refused-stream,reset,retriable-status-codes", '
    "retriable_status_codes: [500, 502, 503], num_retries: 1}"
)
_FROM_HEADER = f"[{{header: {DESTINATION}}}]"
_FROM_METADATA = f"[{{metadata: {{key: {NAMESPACE}, path: [{{key: {DESTINATION}}}]}}}}]"
_DEFAULT_BUFFER = 1024 * 1024
_LONG_MESSAGE = timedelta(seconds=1)
_SHORT_ROUTE = timedelta(minutes=10)
_SHORT_WAIT = timedelta(minutes=1)
_WHOLE_BODY = (
    ProcessingModeBodySendMode.BUFFERED,
    ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED,
)
_NO_ADDRESS = (ClusterDiscoveryType.LOGICAL_DNS, ClusterDiscoveryType.ORIGINAL_DST)

T = TypeVar("T")
Judge = Callable[[Part[T], EnvoyFile], str | None]
"""Says what is so, what comes of it and what to write; None where all is well."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that should hold for certain parts of an Envoy file."""

    name: str
    holds: str
    level: Level
    subjects: Callable[[EnvoyFile], list[Part[Any]]]
    judge: Judge[Any]

    def apply(self, file: EnvoyFile) -> list[Finding]:
        """One finding for each part that breaks it, one OK if none does, nothing without parts."""
        parts = self.subjects(file)
        said = [(part.where, self.judge(part, file)) for part in parts]
        broken = [Finding(self.name, self.level, where, text) for where, text in said if text]
        if broken or not parts:
            return broken
        return [Finding(self.name, Level.OK, "", self.holds)]


RULES: list[Rule] = []


def rule(
    level: Level, subjects: Callable[[EnvoyFile], list[Part[T]]], rules: list[Rule] = RULES
) -> Callable[[Judge[T]], Judge[T]]:
    """Makes a rule of a function, whose docstring begins with what holds where it finds nothing."""

    def add(judge: Judge[T]) -> Judge[T]:
        holds = (judge.__doc__ or "").partition("\n")[0]
        rules.append(Rule(judge.__name__, holds, level, subjects, judge))
        return judge

    return add


def _filters(file: EnvoyFile) -> list[Part[ExternalProcessor]]:
    return file.filters


def bodies_first(file: EnvoyFile) -> list[Part[ExternalProcessor]]:
    """Filters that send the body alone before a request leaves."""
    return [part for part in file.filters if _is_body_first(part)]


def _headers_first(file: EnvoyFile) -> list[Part[ExternalProcessor]]:
    """Where the header decides anything, or may do so in a file that is not seen here."""
    matters = file.reads_header or not file.replica_clusters
    return [part for part in file.filters if matters and not _is_body_first(part)]


def _body_first_routes(file: EnvoyFile) -> list[Part[RouteAction]]:
    """Routes to the replicas whose requests the router sees by their body first."""
    routes = [route for route in file.replica_routes if file.asks(route)]
    return [route for route in routes if any(map(_is_body_first, file.filters_of(route)))]


def _candidates(file: EnvoyFile) -> list[Part[Cluster]]:
    """The replicas' clusters or, where none obeys the router, all that could be meant."""
    routers = {part.path for part in file.router_clusters}
    others = [part for part in file.all(Cluster) if part.path not in routers]
    return file.replica_clusters or others


def _listeners(file: EnvoyFile) -> list[Part[Listener]]:
    """Those with an ext_proc filter; all of them where the filter is in none (a fragment)."""
    listeners = file.all(Listener)
    return [part for part in listeners if file.all(ExternalProcessor, within=part)] or listeners


def _by_route(file: EnvoyFile) -> bool:
    """Whether every route to the replicas has an idle timeout of its own."""
    routes = file.replica_routes
    return bool(routes) and all(route.message.idle_timeout is not None for route in routes)


def _with_second(file: EnvoyFile) -> list[Part[RouteAction]]:
    """Where a second choice can be used: the policy override_host takes a list."""
    clusters = file.replica_clusters
    others = {one.message.name for one in clusters if not file.all(OverrideHost, within=one)}
    return [one for one in file.replica_routes if not clusters_of(one.message) & others]


def _waiting(file: EnvoyFile) -> list[Part[Any]]:
    """What sets idle timeouts for requests to the replicas."""
    managers = [] if _by_route(file) else file.all(HttpConnectionManager)
    return [*managers, *file.replica_routes]


@rule(Level.WARNING, lambda file: [Part((), file)])
def is_complete(part: Part[EnvoyFile], file: EnvoyFile) -> str | None:
    """Filter, listener, route and clusters are all in this file."""
    parts = {"listener": Listener, "route": RouteAction, "cluster": Cluster}
    missing = [name for name, cls in parts.items() if not file.has(cls)]
    if not missing:
        return None
    return f"there is no {' and no '.join(missing)} in this file: check the one that is used, too"


@rule(Level.ERROR, lambda file: _filters(file) if file.has_all_clusters else [])
def router_cluster_exists(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """The router is asked: the cluster that ext_proc names exists."""
    service = part.message.grpc_service
    name = router_cluster(part.message)
    if name in file.cluster_names or (service and service.google_grpc):
        return None
    named = f"names the cluster {name!r}, which does not exist" if name else "names no cluster"
    return (
        f"grpc_service {named}: the router is never asked. "
        "Write grpc_service: {envoy_grpc: {cluster_name: the router's cluster}}"
    )


@rule(Level.ERROR, lambda file: file.all(RouteAction) if file.has_all_clusters else [])
def route_cluster_exists(part: Part[RouteAction], file: EnvoyFile) -> str | None:
    """Every route leads somewhere: its cluster exists."""
    missing = sorted(clusters_of(part.message) - file.cluster_names)
    if not missing:
        return None
    return (
        f"the route leads to {', '.join(map(repr, missing))}, and there is no such cluster: "
        "requests fail. Name a cluster of this file"
    )


@rule(Level.ERROR, lambda file: file.all(RouteAction) if file.replica_clusters else [])
def routes_lead_to_replicas(part: Part[RouteAction], file: EnvoyFile) -> str | None:
    """Requests reach the cluster that obeys the router: a route leads to it."""
    obeying = {cluster.message.name for cluster in file.replica_clusters}
    named = clusters_of(part.message)
    others = sorted(named & file.cluster_names - obeying)
    mixed = named & obeying
    if not others or (
        not mixed and any(_may_lead_to(route, obeying) for route in file.all(RouteAction))
    ):
        return None
    wanted = ", ".join(sorted(map(repr, obeying)))
    return (
        f"the route leads to {', '.join(map(repr, others))}, which ignores the router's choice: "
        f"it has no policy override_host. Write cluster: {wanted}, which has it, or give "
        "load_balancing_policy: override_host to this one"
    )


@rule(Level.ERROR, _filters)
def filter_is_enabled(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """Requests pass the ext_proc filter: it is enabled."""
    if file.is_enabled(part):
        return None
    return (
        "the filter is disabled, and no route enables it: the router is never asked. "
        "Remove disabled: true"
    )


@rule(Level.ERROR, lambda file: file.replica_routes)
def routes_ask(part: Part[RouteAction], file: EnvoyFile) -> str | None:
    """Requests to the replicas pass the ext_proc filter: no route or virtual host disables it."""
    if file.asks(part) or not any(map(file.is_enabled, file.all(ExternalProcessor))):
        return None
    return (
        "the ext_proc filter is disabled for this route: its requests never ask the router. Remove "
        "disabled: true from typed_per_filter_config of the route, its virtual host and its "
        "weighted clusters, or enable the filter there with overrides: {}"
    )


@rule(Level.ERROR, _filters)
def filter_is_reached(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """The ext_proc filter comes before envoy.filters.http.router, which ends the list."""
    if not file.ends_before(part):
        return None
    return (
        "envoy.filters.http.router stands before this filter, and it ends the list: Envoy refuses "
        "the file. Put envoy.filters.http.router last in http_filters"
    )


@rule(Level.ERROR, _filters)
def requests_wait(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """Requests wait for the router: their headers are sent, or a buffer filter holds them."""
    if not _is_body_first(part) or file.is_buffered_after(part):
        return None
    return (
        "request_header_mode is SKIP: the request leaves before its body was seen. Put a filter "
        "envoy.filters.http.buffer right after this one, or write request_header_mode: SEND"
    )


@rule(Level.ERROR, _body_first_routes)
def routes_wait(part: Part[RouteAction], file: EnvoyFile) -> str | None:
    """Where the body comes first, requests are held until it was seen: no route disables that."""
    if file.holds(part):
        return None
    return (
        "the filter envoy.filters.http.buffer is disabled for this route, and request_header_mode "
        "is SKIP: its requests leave before their body was seen. Remove disabled: true, or "
        "override ext_proc's processing_mode there with request_header_mode: SEND"
    )


@rule(Level.ERROR, bodies_first)
def headers_are_told(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """The router hears with the body what it has to know of the headers."""
    missing = [name for name in _HEADERS if name not in part.message.request_attributes]
    if not missing:
        return None
    return (
        f"request_header_mode is SKIP and request_attributes lacks {', '.join(missing)}: the "
        "router does not know which requests make a replica compute, or refuses compressed ones. "
        f"Write request_attributes: [request.id, {', '.join(_HEADERS)}]"
    )


@rule(Level.ERROR, bodies_first)
def metadata_is_followed(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """The router's answer to a body has an effect: the replicas' cluster reads metadata."""
    if not file.reads_header:
        return None
    return (
        "request_header_mode is SKIP: Envoy sets no header then that the router names, and a "
        f"cluster goes by the header {DESTINATION}. Let override_host read the choice "
        f"from metadata: {_FROM_METADATA}, or write request_header_mode: SEND"
    )


@rule(Level.ERROR, _filters)
def body_is_buffered(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """The router sees the whole prompt before the request leaves."""
    mode = _mode(part).request_body_mode
    if mode in _WHOLE_BODY:
        return None
    return (
        f"request_body_mode is {mode.name}: the router cannot measure the prompt before the "
        "request leaves. Write request_body_mode: BUFFERED"
    )


@rule(Level.ERROR, _filters)
def trailers_are_sent(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """Trailers are sent where Envoy insists on it (FULL_DUPLEX_STREAMED)."""
    mode = _mode(part)
    modes = {
        "request": (mode.request_body_mode, mode.request_trailer_mode),
        "response": (mode.response_body_mode, mode.response_trailer_mode),
    }
    missing = [
        way
        for way, (body, trailers) in modes.items()
        if body is ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
        and trailers is not ProcessingModeHeaderSendMode.SEND
    ]
    if not missing:
        return None
    return (
        f"the {' and '.join(missing)} body is FULL_DUPLEX_STREAMED without trailers: Envoy refuses "
        f"the file. Write {', '.join(f'{way}_trailer_mode: SEND' for way in missing)}"
    )


@rule(Level.ERROR, _filters)
def the_end_is_heard(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """The stream stays open until the response has ended, for its close says that it has.

    Envoy closes it when it has nothing more to send, unless it buffers the request's body.
    """
    mode = _mode(part)
    more = (
        mode.request_body_mode is not ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
        or mode.response_body_mode is not ProcessingModeBodySendMode.NONE
        or mode.response_trailer_mode is ProcessingModeHeaderSendMode.SEND
    )
    if more:
        return None
    return (
        "neither the response's body nor its trailers are sent: the router takes a request for "
        "finished when its response begins. Write response_trailer_mode: SEND"
    )


@rule(Level.ERROR, _filters)
def response_headers_are_sent(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """The router hears of every response, or of a sample of which it is told."""
    sent = [one for one in file.filters if not skips_responses(one)]
    told = expression_of(UNSEEN)
    if not skips_responses(part) or (sent and told in part.message.request_attributes):
        return None
    if sent:
        return (
            f"response_header_mode is SKIP and request_attributes lacks {told}: the router waits "
            f"for responses that it is not told of. Add {told} to request_attributes"
        )
    return (
        "response_header_mode is SKIP: the router never learns which replica answered, or how. "
        "Write response_header_mode: SEND"
    )


@rule(Level.WARNING, _filters)
def response_attributes_are_sent(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """The router hears who answered and how: replica, status and flags come with the response."""
    missing = [name for name in _ATTRIBUTES if name not in part.message.response_attributes]
    if not missing:
        return None
    return (
        f"response_attributes lacks {', '.join(missing)}: a retried request counts for the wrong "
        "replica, and a replica that fails fast looks fast. "
        f"Write response_attributes: [{', '.join(_ATTRIBUTES)}]"
    )


@rule(Level.WARNING, _filters)
def allows_sampling(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """The router may read a sample of the streamed responses, and learn from them."""
    whole = _mode(part).response_body_mode is ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
    if part.message.allow_mode_override or whole:
        return None
    return (
        "allow_mode_override is false: the router cannot learn token timing and usage from "
        "streamed responses. Write allow_mode_override: true"
    )


@rule(Level.ERROR, _filters)
def fails_open(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """A router that is down costs no request."""
    if part.message.failure_mode_allow:
        return None
    return (
        "failure_mode_allow is false: every request fails while the router is down. "
        "Write failure_mode_allow: true"
    )


@rule(Level.WARNING, _filters)
def waits_briefly(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """A router that hangs holds no request for long."""
    timeout = part.message.message_timeout
    if timeout is None or timeout <= _LONG_MESSAGE:
        return None
    return (
        f"message_timeout is {timeout.total_seconds():g} s: a router that hangs holds every "
        "request that long. Write message_timeout: 1s"
    )


@rule(Level.ERROR, _headers_first)
def forged_header_is_removed(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """Clients cannot choose a replica: their destination header is removed before ext_proc."""
    if file.removes_before(part, DESTINATION):
        return None
    return (
        f"nothing removes the header {DESTINATION} that a client sends: while the router is down, "
        "clients choose the replica. Put a filter envoy.filters.http.header_mutation before this "
        f"one, with mutations: {{request_mutations: [{{remove: {DESTINATION}}}]}}"
    )


def _marking(file: EnvoyFile) -> list[Part[HttpConnectionManager]]:
    """Those in which the router is told which responses it will not see."""
    mark = expression_of(UNSEEN)
    return [
        manager
        for manager in file.all(HttpConnectionManager)
        for filter in file.all(ExternalProcessor, within=manager)
        if mark in filter.message.request_attributes
    ]


@rule(Level.WARNING, _marking)
def forged_mark_is_removed(part: Part[HttpConnectionManager], file: EnvoyFile) -> str | None:
    """Clients cannot keep responses from the router: the mark that they send is removed."""
    filters = file.all(ExternalProcessor, within=part)
    if all(file.removes_before(one, UNSEEN) for one in filters):
        return None
    return (
        f"nothing removes the header {UNSEEN} that a client sends: the router never hears how its "
        "requests went. Put into this part what envoy/envoy.yaml has under "
        "early_header_mutation_extensions"
    )


@rule(Level.ERROR, _candidates)
def replicas_obey(part: Part[Cluster], file: EnvoyFile) -> str | None:
    """Requests go where the router says: the replicas' cluster obeys it."""
    if part.path in {obeying.path for obeying in file.replica_clusters}:
        return None
    return (
        f"cluster {part.message.name!r} ignores the router's choice. Write "
        f"load_balancing_policy: override_host with override_host_sources: {_sources(file)}"
    )


@rule(Level.ERROR, _candidates)
def no_header_chooses_any_address(part: Part[Cluster], file: EnvoyFile) -> str | None:
    """No header of a client can send a request to any address."""
    if not follows_header(part.message):
        return None
    return (
        f"cluster {part.message.name!r} goes wherever a header says (use_http_header). Write "
        f"metadata_key: {{key: {NAMESPACE}, path: [{{key: {DESTINATION}}}]}}, which no client sets"
    )


@rule(Level.WARNING, _candidates)
def goes_on_without_router(part: Part[Cluster], file: EnvoyFile) -> str | None:
    """Requests are served while the router is down: the cluster has members of its own."""
    if not is_destination(part.message) or follows_header(part.message):
        return None
    return (
        f"cluster {part.message.name!r} is ORIGINAL_DST: it answers 503 while the router is down, "
        "and always to requests that make no replica compute (GET /v1/models, POST /tokenize), for "
        "which the router names none. Where the replicas' addresses are known, write type: "
        "STRICT_DNS (or STATIC, EDS) and load_balancing_policy: override_host"
    )


@rule(Level.ERROR, lambda file: file.all(OverrideHost))
def source_is_known(part: Part[OverrideHost], file: EnvoyFile) -> str | None:
    """The policy override_host reads what the router sets."""
    if reads_header(part.message) or reads_metadata(part.message):
        return None
    return (
        "override_host_sources names nothing that the router sets. "
        f"Write override_host_sources: {_sources(file)}"
    )


def receiving(filter: ExternalProcessor) -> list[str]:
    """Namespaces of metadata that it takes from the router."""
    options = filter.metadata_options
    return options.receiving_namespaces.untyped if options and options.receiving_namespaces else []


@rule(Level.ERROR, _filters)
def metadata_is_received(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
    """Metadata that the router sets is taken, where a cluster reads it."""
    if NAMESPACE in receiving(part.message) or not file.reads_metadata:
        return None
    return (
        f"a cluster reads the metadata {NAMESPACE!r}, but this filter takes none from the router. "
        f"Write metadata_options: {{receiving_namespaces: {{untyped: [{NAMESPACE}]}}}}"
    )


@rule(Level.ERROR, lambda file: file.all(OverrideHost))
def has_fallback(part: Part[OverrideHost], file: EnvoyFile) -> str | None:
    """Requests are served while the router is down: override_host has a fallback policy."""
    if part.message.fallback_policy and part.message.fallback_policy.policies:
        return None
    return (
        "override_host has no fallback_policy: requests fail while the router is down. "
        "Write fallback_policy with envoy.load_balancing_policies.least_request"
    )


@rule(Level.ERROR, lambda file: file.replica_clusters)
def members_are_addresses(part: Part[Cluster], file: EnvoyFile) -> str | None:
    """Every replica is a member of its cluster under its own ip:port."""
    kind = part.message.type
    if kind not in _NO_ADDRESS or is_destination(part.message):
        return None
    return (
        f"cluster {part.message.name!r} is {kind.name}: the ip:port that the router names is no "
        "member of it, and the choice is ignored. Write type: STRICT_DNS, STATIC or EDS"
    )


@rule(Level.ERROR, lambda file: file.router_clusters)
def router_speaks_http2(part: Part[Cluster], file: EnvoyFile) -> str | None:
    """Envoy speaks HTTP/2 to the router, as gRPC needs."""
    explicit = [
        options.message.explicit_http_config
        for options in file.all(HttpProtocolOptions, within=part)
    ]
    modern = any(one and one.http2_protocol_options is not None for one in explicit)
    if modern or part.message.http2_protocol_options is not None:
        return None
    return (
        f"cluster {part.message.name!r} speaks HTTP/1.1: gRPC needs HTTP/2. Write "
        "explicit_http_config: {http2_protocol_options: {}} in its HttpProtocolOptions"
    )


@rule(Level.WARNING, lambda file: file.router_clusters)
def router_is_health_checked(part: Part[Cluster], file: EnvoyFile) -> str | None:
    """A router that hangs is left out: Envoy checks its health."""
    if part.message.health_checks:
        return None
    return (
        f"cluster {part.message.name!r} has no health_checks: while a router hangs, requests wait "
        "for it, each for the whole message_timeout. Write health_checks with grpc_health_check: {}"
    )


@rule(Level.WARNING, lambda file: [*file.router_clusters, *file.replica_clusters])
def limits_are_raised(part: Part[Cluster], file: EnvoyFile) -> str | None:
    """Circuit breakers let all requests in flight through."""
    breakers = part.message.circuit_breakers
    default = [one for one in breakers.thresholds if not one.priority] if breakers else []
    retried = file.all(OverrideHost, within=part) and not any(one.retry_budget for one in default)
    low = [
        f"{name} ({limit})"
        for name, limit in (_LIMITS | _RETRY_LIMIT if retried else _LIMITS).items()
        if max((getattr(one, name) or 0 for one in default), default=0) <= limit
    ]
    if not low:
        return None
    return (
        f"cluster {part.message.name!r} takes no more than Envoy's default in {', '.join(low)}: "
        "every request in flight counts, and those beyond are refused, not retried or not routed. "
        "Raise them in circuit_breakers, for example to 100000 (max_retries: 1000)"
    )


@rule(Level.WARNING, _candidates)
def vanished_replicas_are_hung_up_on(part: Part[Cluster], file: EnvoyFile) -> str | None:
    """A replica whose machine vanished is hung up on."""
    options = part.message.upstream_connection_options
    if options is not None and options.tcp_keepalive is not None:
        return None
    return (
        f"cluster {part.message.name!r} has no tcp_keepalive: requests on a replica whose machine "
        "vanished last as long as clients wait. Write upstream_connection_options: "
        "{tcp_keepalive: {keepalive_time: 10, keepalive_interval: 5, keepalive_probes: 3}}, and "
        "for those sent to it later upstream_bind_config: "
        "{socket_options: [{level: 6, name: 18, int_value: 25000}]} (Linux's TCP_USER_TIMEOUT)"
    )


@rule(Level.WARNING, _listeners)
def large_bodies_pass(part: Part[Listener], file: EnvoyFile) -> str | None:
    """Bodies larger than 1 MiB are accepted."""
    if (part.message.per_connection_buffer_limit_bytes or 0) > _DEFAULT_BUFFER:
        return None
    return (
        "per_connection_buffer_limit_bytes is 1 MiB or less: a larger body, such as one with an "
        "image, gets 413. Write per_connection_buffer_limit_bytes: 67108864"
    )


@rule(Level.WARNING, lambda file: file.all(Buffer))
def large_bodies_are_buffered(part: Part[Buffer], file: EnvoyFile) -> str | None:
    """The buffer filter takes bodies larger than 1 MiB."""
    if (part.message.max_request_bytes or 0) > _DEFAULT_BUFFER:
        return None
    return (
        "max_request_bytes is 1 MiB or less: a larger body, such as one with an image, gets 413. "
        "Write max_request_bytes: 67108864"
    )


@rule(Level.ERROR, lambda file: file.replica_routes)
def answers_may_be_long(part: Part[RouteAction], file: EnvoyFile) -> str | None:
    """No route timeout cuts a long answer."""
    timeout = part.message.timeout
    if timeout == timedelta(0) or (timeout and timeout >= _SHORT_ROUTE):
        return None
    length = "Envoy's default of 15 s" if timeout is None else f"{timeout.total_seconds():g} s"
    return f"the route's timeout is {length}: longer answers are cut. Write timeout: 0s"


@rule(Level.WARNING, lambda file: file.all(HttpConnectionManager))
def answers_may_be_silent(part: Part[HttpConnectionManager], file: EnvoyFile) -> str | None:
    """No idle timeout cuts a request that waits in a replica's queue."""
    if _by_route(file) or part.message.stream_idle_timeout is not None:
        return None
    return (
        "stream_idle_timeout is Envoy's default of 5 min: an answer that is queued or not streamed "
        "for longer is cut. Write stream_idle_timeout: 3600s"
    )


@rule(Level.ERROR, _waiting)
def first_tokens_may_wait(
    part: Part[HttpConnectionManager | RouteAction], file: EnvoyFile
) -> str | None:
    """No short idle timeout cuts a request that waits for its first token."""
    manager = isinstance(part.message, HttpConnectionManager)
    name = "stream_idle_timeout" if manager else "idle_timeout"
    timeout: timedelta | None = getattr(part.message, name)
    if not timeout or timeout >= _SHORT_WAIT:
        return None
    return (
        f"{name} is {timeout.total_seconds():g} s: a request that waits longer for its first token "
        f"is cut. Write {name}: 3600s"
    )


@rule(Level.WARNING, _with_second)
def second_choice_is_used(part: Part[RouteAction], file: EnvoyFile) -> str | None:
    """A request to a replica that just died is tried again on the second choice."""
    policy = part.message.retry_policy
    if policy and policy.num_retries == 0:
        return (
            "num_retries is 0: nothing is tried again, and requests to a replica that just died "
            "fail, though the router names a second choice. Write num_retries: 1"
        )
    if policy and "connect-failure" in policy.retry_on:
        return None
    return (
        "no retry on connect-failure: requests to a replica that just died fail, though the router "
        f"names a second choice. Write retry_policy: {_RETRY_POLICY}"
    )


@rule(Level.WARNING, _with_second)
def failures_are_retried(part: Part[RouteAction], file: EnvoyFile) -> str | None:
    """A request that a broken replica answers with 500 is tried again on the second choice."""
    policy = part.message.retry_policy
    if policy is None or policy.num_retries == 0:
        return None  # nothing is retried: second_choice_is_used says so
    conditions = {one.strip() for one in policy.retry_on.split(",")}
    listed = "retriable-status-codes" in conditions and 500 in policy.retriable_status_codes
    if "5xx" in conditions or listed:
        return None
    return (
        "no retry on status 500: until the router has left out a replica that fails, its failures "
        f"reach clients. Write retry_policy: {_RETRY_POLICY}"
    )


def _is_body_first(part: Part[ExternalProcessor]) -> bool:
    """Whether the body is the first that the router sees of a request."""
    return _mode(part).request_header_mode is ProcessingModeHeaderSendMode.SKIP


def is_full_duplex(part: Part[ExternalProcessor]) -> bool:
    """Whether messages have no timeout."""
    return _mode(part).request_body_mode is ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED


def skips_responses(part: Part[ExternalProcessor]) -> bool:
    """Whether Envoy does not tell the router of responses."""
    return _mode(part).response_header_mode is ProcessingModeHeaderSendMode.SKIP


def _mode(part: Part[ExternalProcessor]) -> ProcessingMode:
    return part.message.processing_mode or ProcessingMode()


def _may_lead_to(route: Part[RouteAction], clusters: set[str]) -> bool:
    """Whether it names one of them, or leaves the name to a header or a plugin."""
    named = clusters_of(route.message)
    return not named or bool(named & clusters)


def _sources(file: EnvoyFile) -> str:
    """What override_host has to read: an answer to a body sets no header."""
    return _FROM_METADATA if bodies_first(file) else _FROM_HEADER
