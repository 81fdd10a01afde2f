"""The rules as tables: what has to hold, and what follows where it does not.

Here those on ext_proc filters and their connection managers, and what both tables share.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from extproc.envoy.envoy_file import BUFFER, EXT_PROC, EnvoyFile, router_cluster
from extproc.envoy.finding import Finding, Level
from extproc.envoy.tree import BOOTSTRAP, MANAGER, Node
from extproc.proxy.messages import (
    DECISION_NAMESPACE,
    DESTINATION,
    PRIORITY,
    RANK,
    RESPONSE_SKIPPED,
    expression_of,
)
from extproc.proxy.messages import (
    METADATA_NAMESPACE as NAMESPACE,
)

DEFAULT_BUFFER = 1024 * 1024  # bytes
_FROM_METADATA = f"[{{metadata: {{key: {NAMESPACE}, path: [{{key: {DESTINATION}}}]}}}}]"
_HEADERS = ("request.path", "request.headers['content-encoding']")
_ATTRIBUTES = ("upstream.address", "response.code", "response.flags")
_LONG_MESSAGE = timedelta(seconds=1)
_DUPLEX = "FULL_DUPLEX_STREAMED"
_MARK = expression_of(RESPONSE_SKIPPED)


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on certain messages of an Envoy file."""

    id: str
    level: Level
    where: Callable[[EnvoyFile], list[Node]]
    holds: str  # the condition, and why it matters
    wrong: Callable[[Node, EnvoyFile], object]  # true where a message breaks it
    words: str = "{}"  # what follows and what to write; ``{}`` is what ``wrong`` gives

    def apply(self, file: EnvoyFile) -> list[Finding]:
        """A finding for each message that breaks the rule; one OK if some are there and keep it."""
        nodes = self.where(file)
        broken = [
            Finding(self.id, self.level, node.where, self.words.format(found, node=node, file=file))
            for node in nodes
            if (found := self.wrong(node, file))
        ]
        return broken or [Finding(self.id, Level.OK, "", self.holds)] * bool(nodes)


def mode(filter: Node, name: str) -> str:
    """A mode of an ext_proc filter, such as ``request_body``."""
    return str(filter["processing_mode"][f"{name}_mode"])


def seconds(time: timedelta | None) -> str:
    """Seconds as text, such as ``1.5``; Envoy takes none for 0."""
    return f"{(time or timedelta()).total_seconds():g}"


def is_body_first(filter: Node) -> bool:
    """The router sees a request by its body alone, which Envoy sends before the request leaves."""
    return mode(filter, "request_header") == "SKIP"


def is_full_duplex(filter: Node) -> bool:
    """Bodies go to the router and come back in chunks, as endpoint pickers are asked."""
    return mode(filter, "request_body") == _DUPLEX


def wanted_sources(file: EnvoyFile) -> str:
    """Sources that override_host has to read: an answer to a body sets no header."""
    return _FROM_METADATA if _bodies_first(file) else f"[{{header: {DESTINATION}}}]"


def _bodies_first(file: EnvoyFile) -> list[Node]:
    return [filter for filter in file.filters if is_body_first(filter)]


def _managers(file: EnvoyFile, has: Callable[[Node], bool]) -> list[Node]:
    """Connection managers with such an ext_proc filter."""
    return [one for one in file.all(MANAGER) if any(map(has, file.all(EXT_PROC, one)))]


def _lets_through(header: str) -> Callable[[Node, EnvoyFile], bool]:
    """Tells whether a client's header reaches an ext_proc filter, or one of those within."""
    return lambda node, file: (
        not all(file.removes_before(filter, header) for filter in file.all(EXT_PROC, node))
    )


def _lacking(wanted: Iterable[str], present: list[str]) -> str:
    return ", ".join(one for one in wanted if one not in present)


def _namespaces(filter: Node) -> list[str]:
    """Namespaces of metadata that a filter takes from the router."""
    return list(filter["metadata_options"]["receiving_namespaces"]["untyped"])


def _lacks_router_cluster(filter: Node, file: EnvoyFile) -> str:
    name = router_cluster(filter)
    if name in file.cluster_names or "google_grpc" in filter["grpc_service"]:
        return ""
    return f"names the cluster {name!r}, which does not exist" if name else "names no cluster"


def _responses_unheard(filter: Node, file: EnvoyFile) -> str:
    sent = [one for one in file.filters if mode(one, "response_header") != "SKIP"]
    if filter in sent or (sent and _MARK in filter["request_attributes"]):
        return ""
    if sent:
        return (
            f"and request_attributes lacks {_MARK}: the router waits for responses that it is not "
            f"told of. Add {_MARK} to request_attributes"
        )
    return (
        ": the router never learns which replica answered, or how. Write response_header_mode: SEND"
    )


# A table: a formatter would give each of its fields a line.
# fmt: off
FILTER_RULES = (
    Rule("router_cluster_exists", Level.ERROR,
        lambda file: file.filters if file.all(BOOTSTRAP) and not file.takes("cds") else [],
        "The router is asked: the cluster that ext_proc names exists.",
        _lacks_router_cluster,
        "grpc_service {}: the router is never asked. "
        "Write grpc_service: {{envoy_grpc: {{cluster_name: the router's cluster}}}}"),
    Rule("filter_is_enabled", Level.ERROR, lambda file: file.filters,
        "Requests pass the ext_proc filter: it is enabled.",
        lambda filter, file: not file.is_enabled(filter),
        "the filter is disabled, and no route enables it: the router is never asked. "
        "Remove disabled: true"),
    Rule("requests_wait", Level.ERROR, lambda file: file.filters,
        "Requests wait for the router: their headers are sent, or a buffer filter holds them.",
        lambda filter, file: is_body_first(filter) and not file.is_buffered_after(filter),
        "request_header_mode is SKIP: the request leaves before its body was seen. Put a filter "
        "envoy.filters.http.buffer right after this one, or write request_header_mode: SEND"),
    Rule("headers_are_told", Level.ERROR, _bodies_first,
        "The router hears with the body what it has to know of the headers.",
        lambda filter, _: _lacking(_HEADERS, filter["request_attributes"]),
        "request_header_mode is SKIP and request_attributes lacks {}: the router does not know "
        "which requests make a replica compute, or refuses compressed ones. "
        f"Write request_attributes: [request.id, {', '.join(_HEADERS)}]"),
    Rule("metadata_is_followed", Level.ERROR, _bodies_first,
        "The router's answer to a body has an effect: the replicas' cluster reads metadata.",
        lambda _, file: "header" in file.sources and _FROM_METADATA,
        "request_header_mode is SKIP: Envoy sets no header then that the router names, and a "
        f"cluster goes by the header {DESTINATION}. Let override_host read the choice "
        "from metadata: {}, or write request_header_mode: SEND"),
    Rule("body_is_buffered", Level.ERROR, lambda file: file.filters,
        "The router sees the whole prompt before the request leaves.",
        lambda filter, _: (
            (body := mode(filter, "request_body")) not in ("BUFFERED", _DUPLEX) and body
        ),
        "request_body_mode is {}: the router cannot measure the prompt before the request leaves. "
        "Write request_body_mode: BUFFERED"),
    Rule("the_end_is_heard", Level.ERROR, lambda file: file.filters,
        "The stream stays open until the response has ended, for its close says that it has.",
        # Envoy closes the stream when it has nothing more to send, unless it buffers the request.
        lambda filter, _: (
            is_full_duplex(filter)
            and mode(filter, "response_body") == "NONE"
            and mode(filter, "response_trailer") != "SEND"
        ),
        "neither the response's body nor its trailers are sent: the router takes a request for "
        "finished when its response begins. Write response_trailer_mode: SEND"),
    Rule("response_headers_are_sent", Level.ERROR, lambda file: file.filters,
        "The router hears of every response, or of a sample of which it is told.",
        _responses_unheard,
        "response_header_mode is SKIP {}"),
    Rule("response_attributes_are_sent", Level.WARNING, lambda file: file.filters,
        "The router hears who answered and how: replica, status and flags come with the response.",
        lambda filter, _: _lacking(_ATTRIBUTES, filter["response_attributes"]),
        "response_attributes lacks {}: a retried request counts for the wrong replica, and a "
        "replica that fails fast looks fast. "
        f"Write response_attributes: [{', '.join(_ATTRIBUTES)}]"),
    Rule("allows_sampling", Level.WARNING, lambda file: file.filters,
        "The router may read a sample of the streamed responses, and learn from them.",
        lambda filter, _: (
            not filter["allow_mode_override"] and mode(filter, "response_body") != _DUPLEX
        ),
        "allow_mode_override is false: the router cannot learn token timing and usage from "
        "streamed responses. Write allow_mode_override: true"),
    Rule("fails_open", Level.ERROR, lambda file: file.filters,
        "A router that is down costs no request.",
        lambda filter, _: not filter["failure_mode_allow"],
        "failure_mode_allow is false: every request fails while the router is down. "
        "Write failure_mode_allow: true"),
    Rule("waits_briefly", Level.WARNING, lambda file: file.filters,
        "A router that hangs holds no request for long.",
        lambda filter, _: (
            (time := filter["message_timeout"]) and time > _LONG_MESSAGE and seconds(time)
        ),
        "message_timeout is {} s: a router that hangs holds every request that long. "
        "Write message_timeout: 1s"),
    Rule("forged_header_is_removed", Level.ERROR,
        lambda file: [one for one in file.filters if not is_body_first(one)]
            if "header" in file.sources or not file.replica_clusters else [],
        "Clients cannot choose a replica: their destination header is removed before ext_proc.",
        lambda filter, file: not file.removes_before(filter, DESTINATION),
        f"nothing removes the header {DESTINATION} that a client sends: while the router is down, "
        "clients choose the replica. Put a filter envoy.filters.http.header_mutation before this "
        f"one, with mutations: {{{{request_mutations: [{{{{remove: {DESTINATION}}}}}]}}}}"),
    Rule("forged_mark_is_removed", Level.WARNING,
        lambda file: _managers(file, lambda filter: _MARK in filter["request_attributes"]),
        "Clients cannot keep responses from the router: the mark that they send is removed.",
        _lets_through(RESPONSE_SKIPPED),
        f"nothing removes the header {RESPONSE_SKIPPED} that a client sends: the router never "
        "hears how its requests went. Put into this part what envoy/envoy.yaml has under "
        "early_header_mutation_extensions"),
    Rule("metadata_is_received", Level.ERROR, lambda file: file.filters,
        "Metadata that the router sets is taken, where a cluster reads it.",
        lambda filter, file: "metadata" in file.sources and NAMESPACE not in _namespaces(filter),
        f"a cluster reads the metadata {NAMESPACE!r}, but this filter takes none from the router. "
        f"Write metadata_options: {{{{receiving_namespaces: {{{{untyped: [{NAMESPACE}]}}}}}}}}"),
    Rule("large_bodies_are_buffered", Level.WARNING, lambda file: file.all(BUFFER),
        "The buffer filter takes bodies larger than 1 MiB.",
        lambda buffer, _: (buffer["max_request_bytes"] or 0) <= DEFAULT_BUFFER,
        "max_request_bytes is 1 MiB or less: a larger body, such as one with an image, gets 413. "
        "Write max_request_bytes: 67108864"),
    Rule("waits_for_room", Level.WARNING,
        lambda file: [one for one in file.filters if not is_full_duplex(one)]
            if file.config.hold.longest_s else [],
        "A request may wait at the router while every replica is full, or none serves its model.",
        lambda filter, file: (
            (time := filter["max_message_timeout"] or timedelta())
            < timedelta(seconds=file.config.hold.longest_s) and seconds(time)
        ),
        "max_message_timeout is {} s: where replicas are full, requests do not wait at the router "
        "but in the replicas, which compute some of them twice. Write max_message_timeout: "
        "{file.config.hold.longest_s:g}s (hold.longest_s)"),
    Rule("decision_metadata_is_taken", Level.WARNING,
        lambda file: file.filters if file.config.serve.decision_metadata else [],
        "Envoy takes what the router tells of decisions, for serve.decision_metadata.",
        lambda filter, _: DECISION_NAMESPACE not in _namespaces(filter),
        "what the router tells of its decisions (serve.decision_metadata) is dropped. Add "
        f"{DECISION_NAMESPACE} to metadata_options.receiving_namespaces.untyped"),
    Rule("named_headers_arrive", Level.ERROR,
        lambda file: _managers(file, lambda _: bool(file.config.headers)),
        "Envoy lets the headers through that the router's settings name.",
        lambda manager, file: (
            manager["common_http_protocol_options"]["headers_with_underscores_action"] != "ALLOW"
            and ", ".join(sorted(name for name in file.config.headers if "_" in name))
        ),
        "headers_with_underscores_action is "
        "{node[common_http_protocol_options][headers_with_underscores_action]}, and the router's "
        "settings name {}: what clients send by such a name never arrives. Take a name with '-'"),
    Rule("named_headers_are_told", Level.ERROR,
        lambda file: _bodies_first(file) if file.config.headers else [],
        "The router hears the headers that its settings name.",
        lambda filter, file: _lacking(
            sorted(map(expression_of, file.config.headers)), filter["request_attributes"]
        ),
        "request_header_mode is SKIP and request_attributes lacks headers that the router's "
        "settings name, so that they have no effect. Add {}"),
    Rule("forged_priority_is_removed", Level.WARNING,
        lambda file: _bodies_first(file) if file.config.hold.has_priorities else [],
        "Clients cannot choose the order in which replicas take requests: their header goes.",
        lambda filter, file: not file.removes_before(filter, PRIORITY),
        f"nothing removes the header {PRIORITY} that a client sends, and vLLM prefers it to the "
        "priority that the router writes into bodies. Put into the HttpConnectionManager what "
        "envoy/envoy.yaml has under early_header_mutation_extensions"),
    Rule("forged_rank_is_removed", Level.WARNING,
        lambda file: _managers(file, is_body_first),
        "Clients cannot choose an engine of a data-parallel replica: their header goes.",
        _lets_through(RANK),
        f"nothing removes the header {RANK} that a client sends, and vLLM takes the engine that it "
        "names, however busy. Put into the HttpConnectionManager what envoy/envoy.yaml has under "
        "early_header_mutation_extensions"),
)
# fmt: on
