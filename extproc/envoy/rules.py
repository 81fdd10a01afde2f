"""Rules on ext_proc filters and their connection managers, as a table.

:mod:`extproc.envoy.cluster_rules` has the rules on clusters, listeners and routes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from extproc.envoy.envoy_file import BUFFER, EXT_PROC, OVERRIDE_HOST, EnvoyFile, router_cluster
from extproc.envoy.finding import Finding, Level
from extproc.envoy.tree import MANAGER, Node
from extproc.proxy.messages import (
    ATTEMPTS,
    DECISION_NAMESPACE,
    DESTINATION,
    METADATA_NAMESPACE,
    PRIORITY,
    RANK,
    RESPONSE_SKIPPED,
    expression_of,
)

DEFAULT_BUFFER = 1024 * 1024  # bytes
_FROM_METADATA = f"[{{metadata: {{key: {METADATA_NAMESPACE}, path: [{{key: {DESTINATION}}}]}}}}]"
_ATTRIBUTES_OF_REQUEST = ("request.path", "request.headers['content-encoding']")
_ATTRIBUTES_OF_RESPONSE = ("upstream.address", ATTEMPTS, "response.flags")
_LONG_MESSAGE = timedelta(seconds=1)
_DUPLEX = "FULL_DUPLEX_STREAMED"
_SKIPPED = expression_of(RESPONSE_SKIPPED)
_REMOVE_EARLY = (
    "Copy early_header_mutation_extensions from envoy/envoy.yaml of the project's repository into "
    "the HttpConnectionManager"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on certain protobuf messages (nodes) of an Envoy file."""

    id: str
    level: Level  # of a message that breaks the rule
    subjects: Callable[[EnvoyFile], list[Node]]  # messages that the rule judges
    ok: str  # text of the finding if every message keeps the rule
    problem: Callable[[Node, EnvoyFile], object]  # truthy for a message that breaks the rule
    text: str = "{}"  # problem, consequence, remedy; ``{}`` stands for the value of ``problem``

    def apply(self, file: EnvoyFile) -> list[Finding]:
        """Return a finding for each mistake, or a single OK if there is none.

        Routes that override a filter, and YAML anchors, may repeat a mistake; the finding names the
        first place and counts the other places.
        """
        nodes, places = self.subjects(file), dict[str, list[str]]()
        for node in nodes:
            if found := self.problem(node, file):
                text = self.text.format(found, node=node, file=file)
                places.setdefault(text, []).append(node.where)
        broken = [
            Finding(self.id, self.level, first + (f" and {len(more)} more" if more else ""), text)
            for text, (first, *more) in places.items()
        ]
        return broken or [Finding(self.id, Level.OK, "", self.ok)] * bool(nodes)


def mode(filter: Node, name: str) -> str:
    """Return the processing mode that an ext_proc filter has for ``name``: ``request_body``, …"""
    return str(filter["processing_mode"][f"{name}_mode"])


def seconds(time: timedelta | None) -> str:
    """Return seconds as text, such as ``1.5``; Envoy reads a missing duration as 0."""
    return f"{(time or timedelta()).total_seconds():g}"


def is_body_first(filter: Node) -> bool:
    """Return true if the request's body, not its headers, is the first message to the router."""
    return mode(filter, "request_header") == "SKIP"


def is_full_duplex(filter: Node) -> bool:
    """Return true if bodies go to the router and back in chunks, as for endpoint pickers."""
    return mode(filter, "request_body") == _DUPLEX


def wanted_sources(file: EnvoyFile) -> str:
    """Return the ``override_host_sources`` that fit the protocol.

    A reply to a body can set no header, so if the body comes first, only metadata works.
    """
    return _FROM_METADATA if _bodies_first(file) else f"[{{header: {DESTINATION}}}]"


def _bodies_first(file: EnvoyFile) -> list[Node]:
    return [filter for filter in file.filters if is_body_first(filter)]


def _managers(file: EnvoyFile, has: Callable[[Node], bool]) -> list[Node]:
    """Return connection managers with an ext_proc filter for which ``has`` returns true."""
    managers = file.all(MANAGER)
    return [manager for manager in managers if any(map(has, file.ext_procs_in(manager)))]


def _lets_through(header: str) -> Callable[[Node, EnvoyFile], bool]:
    """Return a test: true if a client's ``header`` reaches an ext_proc filter of a manager."""
    return lambda node, file: (
        not all(file.removes_before(filter, header) for filter in file.ext_procs_in(node))
    )


def _lacking(wanted: Iterable[str], present: list[str]) -> str:
    return ", ".join(name for name in wanted if name not in present)


def _namespaces(filter: Node, way: str = "receiving") -> list[str]:
    """Return the metadata namespaces that a filter lists for receiving or for forwarding."""
    return list(filter["metadata_options"][f"{way}_namespaces"]["untyped"])


def _lacks_router_cluster(filter: Node, file: EnvoyFile) -> str:
    name = router_cluster(filter)
    if name in file.cluster_names or "google_grpc" in filter["grpc_service"]:
        return ""
    return f"names the cluster {name!r}, which does not exist" if name else "names no cluster"


def _skips_responses(filter: Node, file: EnvoyFile) -> str:
    sending = [each for each in file.filters if mode(each, "response_header") != "SKIP"]
    if filter in sending or (sending and _SKIPPED in filter["request_attributes"]):
        return ""
    if sending:
        return (
            f"and request_attributes lacks {_SKIPPED}: the router waits for responses that Envoy "
            f"does not send to it. Add {_SKIPPED} to request_attributes"
        )
    return (
        ": the router never learns which replica answered, or how. Write response_header_mode: SEND"
    )


def takes_one_address(file: EnvoyFile) -> list[Node]:
    """Return the replica clusters that lack override_host: they accept one address, not a list."""
    return [cluster for cluster in file.replica_clusters if not file.all(OVERRIDE_HOST, cluster)]


def names_second(file: EnvoyFile) -> bool:
    """Return true if the router names a second choice of replica, for retries."""
    setting = file.config.serve.second_choice
    return not all(map(is_full_duplex, file.filters)) if setting is None else setting


# A table: the formatter would give each field a line.
# fmt: off
FILTER_RULES = (
    Rule("router_cluster_exists", Level.ERROR,
        lambda file: file.filters if file.lists_all_clusters else [],
        "The router's cluster, which ext_proc names, exists.",
        _lacks_router_cluster,
        "grpc_service {}: Envoy never asks the router. "
        "Write grpc_service: {{envoy_grpc: {{cluster_name: the router's cluster}}}}"),
    Rule("filter_is_enabled", Level.ERROR,
        lambda file: [filter for filter in file.all(EXT_PROC)
            if filter in file.ext_procs or METADATA_NAMESPACE in _namespaces(filter)],
        "The ext_proc filter is enabled, or a route enables it.",
        lambda filter, file: not file.is_enabled(filter),
        "the filter is disabled, and no route enables it: Envoy never asks the router. "
        "Remove disabled: true"),
    Rule("requests_wait", Level.ERROR, lambda file: file.filters,
        "Headers come first, or a buffer filter holds requests until the router has their body.",
        lambda filter, file: is_body_first(filter) and not file.is_buffered_after(filter),
        "request_header_mode is SKIP: the request leaves before the router has its body. Put a "
        "filter envoy.filters.http.buffer right after this one, or write request_header_mode: "
        "SEND"),
    Rule("headers_come_with_body", Level.ERROR, _bodies_first,
        "request_attributes has path, encoding and the headers that the router's settings name.",
        lambda filter, file: _lacking(
            [*_ATTRIBUTES_OF_REQUEST, *sorted(map(expression_of, file.config.headers))],
            filter["request_attributes"],
        ),
        "request_header_mode is SKIP and request_attributes lacks {}: without request.path the "
        "router cannot tell which requests a replica computes, without content-encoding it refuses "
        "compressed requests, and a header that its settings name has no effect. Add them"),
    Rule("cluster_reads_metadata", Level.ERROR,
        lambda file: _bodies_first(file) if file.sources else [],
        "With the body first, the replica cluster reads the router's choice from metadata.",
        lambda _, file: "header" in file.sources and _FROM_METADATA,
        "request_header_mode is SKIP, so the router can set no header, but a cluster goes by the "
        f"header {DESTINATION}. Write override_host_sources: {{}}, or request_header_mode: SEND"),
    Rule("body_is_buffered", Level.ERROR, lambda file: file.filters,
        "request_body_mode sends the whole prompt.",
        lambda filter, _: (
            (body := mode(filter, "request_body")) not in ("BUFFERED", _DUPLEX) and body
        ),
        "request_body_mode is {}: the router would see the prompt after the request has left, and "
        "leaves the choice to Envoy. Write request_body_mode: BUFFERED"),
    Rule("response_end_is_sent", Level.ERROR, lambda file: file.filters,
        "The stream to the router stays open until the response has ended.",
        # Envoy closes the stream when it has nothing more to send, unless it buffers the request.
        lambda filter, _: (
            is_full_duplex(filter)
            and mode(filter, "response_body") == "NONE"
            and mode(filter, "response_trailer") != "SEND"
        ),
        "neither body nor trailers of the response are sent: the router takes a request for "
        "finished when its response begins. Write response_trailer_mode: SEND"),
    Rule("response_headers_are_sent", Level.ERROR, lambda file: file.filters,
        "response_header_mode is SEND, or the router knows which responses Envoy does not send.",
        _skips_responses,
        "response_header_mode is SKIP {}"),
    Rule("response_attributes_are_sent", Level.WARNING, lambda file: file.filters,
        "response_attributes has the replica, retries and flags.",
        lambda filter, _: _lacking(_ATTRIBUTES_OF_RESPONSE, filter["response_attributes"]),
        "response_attributes lacks {}: retries and failures count for the wrong replica, or not at "
        "all. "
        f"Write response_attributes: [{', '.join(_ATTRIBUTES_OF_RESPONSE)}]"),
    Rule("allows_sampling", Level.WARNING, lambda file: file.filters,
        "The router may read a sample of the streamed responses and learn from them.",
        lambda filter, _: (
            not filter["allow_mode_override"] and mode(filter, "response_body") != _DUPLEX
        ),
        "allow_mode_override is false: the router cannot learn token timing and usage from "
        "streamed responses. Write allow_mode_override: true"),
    Rule("fails_open", Level.ERROR, lambda file: file.filters,
        "Envoy goes on without a reply of the router: failure_mode_allow is true.",
        lambda filter, _: not filter["failure_mode_allow"],
        "failure_mode_allow is false: every request fails while the router is down. "
        "Write failure_mode_allow: true"),
    Rule("message_timeout_is_short", Level.WARNING, lambda file: file.filters,
        "A router that hangs delays a request by a second at most.",
        lambda filter, _: (
            (time := filter["message_timeout"]) and time > _LONG_MESSAGE and seconds(time)
        ),
        "message_timeout is {} s: a router that hangs delays every request that long. "
        "Write message_timeout: 1s"),
    Rule("observer_is_not_awaited", Level.WARNING,
        lambda file: file.filters if file.config.serve.mode == "observe" else [],
        "Requests do not wait for a router that only observes.",
        lambda filter, _: not filter["observability_mode"],
        "serve.mode is observe, but Envoy waits for each reply of the router: a router that hangs "
        "delays requests. Take the filter of envoy/observe.yaml of the project's "
        "repository"),
    Rule("forged_destination_is_removed", Level.ERROR,
        lambda file: [filter for filter in file.filters if not is_body_first(filter)]
            if "header" in file.sources or not file.replica_clusters else [],
        "Clients cannot choose a replica: their destination header is removed before ext_proc.",
        lambda filter, file: not file.removes_before(filter, DESTINATION),
        f"a client's header {DESTINATION} is not removed: while the router is down, clients choose "
        "the replica. Put a filter envoy.filters.http.header_mutation before this one, with "
        f"mutations: {{{{request_mutations: [{{{{remove: {DESTINATION}}}}}]}}}}"),
    Rule("forged_mark_is_removed", Level.WARNING,
        lambda file: _managers(file, lambda filter: _SKIPPED in filter["request_attributes"]),
        f"Clients cannot hide responses from the router: their {RESPONSE_SKIPPED} is removed.",
        _lets_through(RESPONSE_SKIPPED),
        f"a client's header {RESPONSE_SKIPPED} is not removed: the router never learns how such "
        f"requests ended. {_REMOVE_EARLY}"),
    Rule("metadata_is_received", Level.ERROR,
        lambda file: file.filters if "metadata" in file.sources else [],
        "Envoy accepts the router's metadata, which a cluster reads.",
        lambda filter, _: METADATA_NAMESPACE not in _namespaces(filter),
        f"a cluster reads the metadata {METADATA_NAMESPACE!r}, but this filter takes none from the "
        "router. Write metadata_options: "
        f"{{{{receiving_namespaces: {{{{untyped: [{METADATA_NAMESPACE}]}}}}}}}}"),
    Rule("metadata_is_forwarded", Level.WARNING,
        lambda file: [filter for filter in file.filters
            if METADATA_NAMESPACE in _namespaces(filter)],
        "The router can tell why Envoy did not follow a decision: Envoy forwards its choice.",
        lambda filter, _: METADATA_NAMESPACE not in _namespaces(filter, "forwarding"),
        f"the metadata {METADATA_NAMESPACE!r} is not forwarded: the router cannot tell whether a "
        "filter changed its choice or Envoy skipped the address. Write metadata_options: "
        f"{{{{forwarding_namespaces: {{{{untyped: [{METADATA_NAMESPACE}]}}}}}}}}"),
    Rule("large_bodies_are_buffered", Level.WARNING, lambda file: file.all(BUFFER),
        "The buffer filter accepts bodies larger than 1 MiB.",
        lambda buffer, _: (buffer["max_request_bytes"] or 0) <= DEFAULT_BUFFER,
        "max_request_bytes is 1 MiB or less: a larger body, such as one with an image, gets 413. "
        "Write max_request_bytes: 67108864"),
    Rule("requests_can_queue", Level.WARNING,
        lambda file: [filter for filter in file.filters if not is_full_duplex(filter)]
            if file.config.hold.longest_s else [],
        "Requests can wait at the router while every replica is full or none serves their model.",
        lambda filter, file: (
            (time := filter["max_message_timeout"] or timedelta())
            < timedelta(seconds=file.config.hold.longest_s) and seconds(time)
        ),
        "max_message_timeout is {} s: while replicas are full, requests wait in the replicas, not "
        "at the router, and some are computed twice. Write max_message_timeout: "
        "{file.config.hold.longest_s:g}s (hold.longest_s)"),
    Rule("decision_metadata_is_received", Level.WARNING,
        lambda file: file.filters if file.config.serve.decision_metadata else [],
        "Envoy accepts the metadata on decisions (serve.decision_metadata).",
        lambda filter, _: DECISION_NAMESPACE not in _namespaces(filter),
        "Envoy drops the metadata on decisions (serve.decision_metadata). Add "
        f"{DECISION_NAMESPACE} to metadata_options.receiving_namespaces.untyped"),
    Rule("named_headers_arrive", Level.ERROR,
        lambda file: _managers(file, lambda _: bool(file.config.headers)),
        "Envoy drops no header that the router's settings name.",
        lambda manager, file: (
            manager["common_http_protocol_options"]["headers_with_underscores_action"] != "ALLOW"
            and ", ".join(sorted(name for name in file.config.headers if "_" in name))
        ),
        "headers_with_underscores_action is "
        "{node[common_http_protocol_options][headers_with_underscores_action]}, and the router's "
        "settings name {}: Envoy never passes on such a header. Choose a name with '-'"),
    Rule("forged_priority_is_removed", Level.WARNING,
        lambda file: _bodies_first(file) if file.config.hold.has_priorities else [],
        f"Clients cannot set their priority in vLLM: their header {PRIORITY} is removed.",
        lambda filter, file: not file.removes_before(filter, PRIORITY),
        f"a client's header {PRIORITY} is not removed, and vLLM prefers the header to the priority "
        f"that the router writes into bodies. {_REMOVE_EARLY}"),
    Rule("forged_rank_is_removed", Level.WARNING,
        lambda file: _managers(file, is_body_first),
        f"Clients cannot choose a data-parallel engine: their header {RANK} is removed.",
        _lets_through(RANK),
        f"a client's header {RANK} is not removed, and vLLM uses the engine that the header names, "
        f"however busy. {_REMOVE_EARLY}"),
)
# fmt: on
