"""Table of rules on an Envoy that lets the router only observe (``observability_mode``)."""

from datetime import timedelta

from extproc.envoy.cluster_rules import CLUSTER_RULES
from extproc.envoy.envoy_file import EnvoyFile
from extproc.envoy.finding import Level
from extproc.envoy.route_rules import ROUTE_RULES
from extproc.envoy.rules import FILTER_RULES, Rule, mode, seconds

_DEFAULT_CLOSE = timedelta(seconds=5)
_LATE_CLOSE = timedelta(seconds=0.5)
_SHARED = {
    "router_cluster_exists",
    "filter_is_enabled",
    "routes_can_match",
    "response_headers_are_sent",
    "response_attributes_are_sent",
    "fails_open",
    "router_speaks_http2",
    "router_is_health_checked",
    "limits_are_raised",
    "router_port_matches",
    "mapped_port_leads_to_router",
    "transport_matches",
}
"""Rules that also apply if Envoy does not wait for the router."""


def only_observes(file: EnvoyFile) -> bool:
    """Return true if Envoy ignores all replies of the router."""
    return all(filter["observability_mode"] for filter in file.ext_procs)


# A table: the formatter would give each field a line.
# fmt: off
OBSERVER_RULES = (
    *(rule for rule in (*FILTER_RULES, *ROUTE_RULES, *CLUSTER_RULES) if rule.id in _SHARED),
    Rule("router_is_ignored", Level.ERROR, lambda file: file.ext_procs,
        "Envoy and the router agree that the router only observes.",
        lambda _, file: file.config.serve.mode != "observe",
        "observability_mode is true, so Envoy ignores the router's choices, and serve.mode is "
        "route. Set serve.mode: observe, or take the filter of envoy/ext_proc.yaml of "
        "the project's repository"),
    Rule("bodies_are_copied", Level.ERROR, lambda file: file.filters,
        "The router gets a copy of the prompt.",
        lambda filter, _: (body := mode(filter, "request_body")) != "STREAMED" and body,
        "request_body_mode is {}: with observability_mode, Envoy sends no body in this mode. Write "
        "request_body_mode: STREAMED"),
    Rule("responses_are_sampled", Level.WARNING, lambda file: file.ext_procs,
        "The router gets the bodies of some responses, and learns from them.",
        lambda _, file: all(mode(each, "response_body") != "STREAMED" for each in file.filters),
        "response_body_mode is nowhere STREAMED: the router never sees the end of a response, and "
        "compares no prediction with the actual time. Copy the first route of envoy/observe.yaml "
        "of the project's repository"),
    Rule("end_is_told_soon", Level.WARNING, lambda file: file.ext_procs,
        "The router learns at once that a response has ended.",
        lambda filter, _: (
            (time := filter["deferred_close_timeout"] or _DEFAULT_CLOSE) > _LATE_CLOSE
            and seconds(time)
        ),
        "deferred_close_timeout is {} s: for the router each request lasts that much longer. Write "
        "deferred_close_timeout: 0.2s"),
)
# fmt: on
