"""Rules on routes to the replicas, and on the listeners in front of them, as a table."""

from datetime import timedelta

from extproc.envoy.envoy_file import BUFFER, EXT_PROC, EnvoyFile, clusters_of
from extproc.envoy.finding import Level
from extproc.envoy.rules import DEFAULT_BUFFER, Rule, is_body_first, seconds, takes_one_address
from extproc.envoy.tree import LISTENER, MANAGER, ROUTE, ROUTE_ENTRY, VIRTUAL_HOST, Node

_ANY_PATH = (".*", ".+", "/.*")
_SHORT_ROUTE = timedelta(minutes=10)
_SHORT_WAIT = timedelta(minutes=1)
_RETRIED = ("connect-failure", "status 500", "status 401", "status 403")
"""Failures for which another replica has to be tried. A replica answers 401 or 403 to each request
if its ``--api-key`` is not that of the others."""
_OF_CONNECTIONS = {"5xx", "gateway-error", "reset"}  # include connect-failure


def _has_route_timeouts(file: EnvoyFile) -> bool:
    """Return true if every route to the replicas sets an idle timeout."""
    routes = file.replica_routes
    return bool(routes) and all("idle_timeout" in route for route in routes)


def _with_second(file: EnvoyFile) -> list[Node]:
    """Return the routes on which Envoy can retry on the router's second choice."""
    others = {cluster["name"] for cluster in takes_one_address(file)}
    return [route for route in file.replica_routes if not clusters_of(route) & others]


def _leads_elsewhere(route: Node, file: EnvoyFile) -> str:
    obeying = {cluster["name"] for cluster in file.replica_clusters}
    named = clusters_of(route)
    missing = named - file.cluster_names if file.lists_all_clusters else set()
    others = named & file.cluster_names - obeying
    routes = map(clusters_of, file.all(ROUTE))
    if not named & obeying and any(not names or names & obeying for names in routes):
        return ""
    write = f"Write cluster: {' or '.join(sorted(map(repr, obeying)))}"
    if missing:
        return (
            f"the route leads to {', '.join(sorted(map(repr, missing)))}, a cluster that the file "
            f"lacks. {write}, which obeys the router"
        )
    if others:
        return (
            f"the route leads to {', '.join(sorted(map(repr, others)))}, which ignores the "
            f"router's choice: it has no policy override_host. {write}, which has it, or give "
            "load_balancing_policy: override_host to this one"
        )
    return ""


def _hiding(route: Node, file: EnvoyFile) -> str:
    """Return the first entry that takes every request before this route, such as ``routes[0]``."""
    entry = route.path[:-1]
    hiding = (
        other.path
        for other in file.all(ROUTE_ENTRY)
        if other.path[:-1] == entry[:-1] and other.path < entry and _takes_all(other["match"])
    )
    return next((f"{name}[{index}]" for *_, name, index in hiding), "")


def _takes_all(match: Node) -> bool:
    every_path = match.get("prefix") in ("", "/") or match["safe_regex"]["regex"] in _ANY_PATH
    return every_path and match.keys() <= {"prefix", "safe_regex", "case_sensitive"}


def _cuts_responses(route: Node, _: EnvoyFile) -> str:
    if (timeout := route["timeout"]) is None:
        return "Envoy's default of 15 s"
    return f"{seconds(timeout)} s" if timedelta() < timeout < _SHORT_ROUTE else ""


def _cuts_waiting(node: Node, _: EnvoyFile) -> str:
    name = "stream_idle_timeout" if node.kind == MANAGER else "idle_timeout"
    timeout = node[name]
    if not timeout or timeout >= _SHORT_WAIT:
        return ""
    return (
        f"{name} is {seconds(timeout)} s: Envoy cuts a request that waits longer for its first "
        f"token. Write {name}: 3600s"
    )


def _not_retried(route: Node, file: EnvoyFile) -> str:
    """Return the failures of a dead or misconfigured replica that the route does not retry."""
    policy = route["retry_policy"] or (file.around(route, VIRTUAL_HOST) or route)["retry_policy"]
    if policy and policy["num_retries"] == 0:
        return "anything (num_retries: 0)"
    conditions = {condition.strip() for condition in policy["retry_on"].split(",")}
    if "retriable-status-codes" in conditions:
        conditions |= {f"status {code}" for code in policy["retriable_status_codes"]}
    if "5xx" in conditions:
        conditions.add("status 500")
    if conditions & _OF_CONNECTIONS:
        conditions.add("connect-failure")
    return ", ".join(failure for failure in _RETRIED if failure not in conditions)


# A table: the formatter would give each field a line.
# fmt: off
ROUTE_RULES = (
    Rule("routes_lead_to_replicas", Level.ERROR,
        lambda file: file.all(ROUTE) if file.replica_clusters else [],
        "A route leads to the replicas' cluster.",
        _leads_elsewhere),
    Rule("routes_can_match", Level.ERROR, lambda file: file.replica_routes,
        "No route to the replicas stands behind a route that takes every request.",
        _hiding,
        "the route never matches: {}, before it in the virtual host, takes every request. "
        "Move that route to the end"),
    Rule("routes_ask_router", Level.ERROR,
        lambda file: file.replica_routes
            if any(map(file.is_enabled, file.all(EXT_PROC))) else [],
        "The ext_proc filter is enabled for every route to the replicas.",
        lambda route, file: not file.passes(EXT_PROC, route),
        "the ext_proc filter is disabled for this route: its requests never ask the router. Remove "
        "disabled: true from typed_per_filter_config of the route, its virtual host and its "
        "weighted clusters, or enable the filter there with overrides: {{}}"),
    Rule("routes_wait", Level.ERROR,
        lambda file: [route for route in file.replica_routes
            if any(map(is_body_first, file.filters_of(route)))]
            if file.all(BUFFER) else [],
        "The buffer filter is enabled for every route on which the body comes first.",
        lambda route, file: not file.passes(BUFFER, route),
        "the filter envoy.filters.http.buffer is disabled for this route, and request_header_mode "
        "is SKIP: requests leave before the router has their body. Remove disabled: true, or "
        "override ext_proc's processing_mode there with request_header_mode: SEND"),
    Rule("large_bodies_pass", Level.WARNING,
        lambda file: [listener for listener in file.all(LISTENER) if file.ext_procs_in(listener)]
            or file.all(LISTENER),  # a fragment has the filter outside of its listeners
        "The listener accepts bodies larger than 1 MiB.",
        lambda listener, _: (
            (listener["per_connection_buffer_limit_bytes"] or 0) <= DEFAULT_BUFFER
        ),
        "per_connection_buffer_limit_bytes is 1 MiB or less: a larger body, such as one with an "
        "image, gets 413. Write per_connection_buffer_limit_bytes: 67108864"),
    Rule("responses_may_be_long", Level.ERROR, lambda file: file.replica_routes,
        "No route timeout cuts a long response.",
        _cuts_responses,
        "the route's timeout is {}: Envoy cuts longer responses. Write timeout: 0s"),
    Rule("responses_may_be_silent", Level.WARNING, lambda file: file.managers,
        "No default idle timeout cuts a request that waits in a replica's queue.",
        lambda manager, file: (
            "stream_idle_timeout" not in manager and not _has_route_timeouts(file)
        ),
        "stream_idle_timeout is Envoy's default of 5 min: Envoy cuts a response that is queued or "
        "not streamed for longer. Write stream_idle_timeout: 3600s"),
    Rule("first_tokens_may_wait", Level.ERROR,
        lambda file: [
            *([] if _has_route_timeouts(file) else file.managers), *file.replica_routes
        ],
        "No short idle timeout cuts a request that waits for its first token.",
        _cuts_waiting),
    Rule("second_choice_is_tried", Level.WARNING, _with_second,
        "A request that a dead or broken replica fails is tried again.",
        _not_retried,
        "the route does not retry on {}: clients get the failures of a replica that is dead, "
        "answers 500 or has another --api-key, though the router names a second choice. Write "
        'retry_policy: {{retry_on: "connect-failure,refused-stream,reset,retriable-status-codes", '
        "retriable_status_codes: [401, 403, 500, 502, 503], num_retries: 1}}"),
)
# fmt: on
