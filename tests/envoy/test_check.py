"""``extproc check --envoy``: one defect in a good file is reported, and nothing else is."""

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from extproc.config import Config
from extproc.envoy.check import RULES, check_envoy
from extproc.envoy.envoy_file import EnvoyFile
from extproc.envoy.finding import Finding, Level
from extproc.envoy.observer_rules import OBSERVER_RULES
from extproc.envoy.tree import CLUSTER
from extproc.ground.yaml_file import read_yaml
from extproc.lab.harness.envoy_config import manager_of
from tests.conftest import Cli
from tests.envoy.watched_files import bootstrap

ENVOY = Path(__file__).parents[2] / "envoy"
GOOD = yaml.load((ENVOY / "envoy.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)

DESTINATION = "x-gateway-destination-endpoint"
SKIPPED = "request.headers['x-extproc-response-skipped']"
FROM_METADATA = f"[{{metadata: {{key: envoy.lb, path: [{{key: {DESTINATION}}}]}}}}]"
UNJUDGED = {
    *("forged_destination_is_removed", "one_replica_is_named", "named_headers_arrive"),
    *("forged_priority_is_removed", "decision_metadata_is_received", "transport_matches"),
    *("observer_is_not_awaited", "observed_requests_are_served"),
    *("placeholder_is_replaced", "members_are_replicas"),
}
"""Rules that concern nothing in the shipped files with default settings."""
BY_HOST = {"router_port_matches", "mapped_port_leads_to_router"}
"""Rules on a router's port: one if the router has an IP address, the other if it has a name."""
ONLY_IN_WHOLE_FILES = {"router_cluster_exists"}

Breakage = Callable[["EditableBootstrap"], object]


class EditableBootstrap:
    """A copy of envoy/envoy.yaml whose parts the tests break."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = copy.deepcopy(GOOD)
        resources = self.tree["static_resources"]
        self.listener = resources["listeners"][0]
        self.manager = self.listener["filter_chains"][0]["filters"][0]["typed_config"]
        self.filters = self.manager["http_filters"]
        early = self.manager["early_header_mutation_extensions"]
        self.removed_headers = early[0]["typed_config"]["mutations"]
        del self.filters[:2]  # they choose between the routes that are deleted below
        self.ext_proc = self.filters[0]["typed_config"]
        self.mode = self.ext_proc["processing_mode"]
        self.namespaces = self.ext_proc["metadata_options"]["receiving_namespaces"]["untyped"]
        self.host = self.manager["route_config"]["virtual_hosts"][0]
        self.routes = self.host["routes"]
        del self.routes[:-1]  # the others lead to the same cluster
        self.route = self.routes[0]["route"]
        self.clusters = resources["clusters"]
        self.router, self.replicas = self.clusters
        policies = self.replicas["load_balancing_policy"]["policies"]
        self.override = policies[0]["typed_extension_config"]["typed_config"]

    def split(self, *clusters: dict[str, object]) -> Self:
        del self.route["cluster"]
        self.route["weighted_clusters"] = {
            "clusters": [{"weight": 1, **cluster} for cluster in clusters]
        }
        return self

    def address_router(self, host: str) -> Self:
        """Let the router have an IP address instead of a name."""
        (endpoint,) = self.router["load_assignment"]["endpoints"][0]["lb_endpoints"]
        endpoint["endpoint"]["address"]["socket_address"]["address"] = host
        return self

    def list_replicas(self, *hosts: str) -> Self:
        """Let the replicas' cluster have these members, each on port 8000."""
        endpoints = [
            {"endpoint": {"address": {"socket_address": {"address": host, "port_value": 8000}}}}
            for host in hosts
        ]
        self.replicas["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
        return self

    def name_port(self, cluster: dict[str, Any]) -> Self:
        """Name the port of a cluster's member, which Envoy then reads as 0."""
        (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        address = endpoint["endpoint"]["address"]["socket_address"]
        address["named_port"] = str(address.pop("port_value"))
        return self

    def add_router(self, port: int) -> Self:
        endpoints = self.router["load_assignment"]["endpoints"][0]["lb_endpoints"]
        endpoints.append(copy.deepcopy(endpoints[0]))
        endpoints[-1]["endpoint"]["address"]["socket_address"]["port_value"] = port
        return self

    def resolve(self, as_one: bool) -> None:
        """Let an extension resolve the replicas' name, in place of the cluster's type."""
        del self.replicas["type"], self.replicas["dns_lookup_family"]
        kind = "type.googleapis.com/envoy.extensions.clusters.dns.v3.DnsCluster"
        fields = {"@type": kind, "all_addresses_in_single_endpoint": as_one}
        self.replicas["cluster_type"] = {"name": "envoy.clusters.dns", "typed_config": fields}

    def add_cluster(self, name: str) -> Self:
        """Add a cluster that does not obey the router."""
        self.clusters.append({"name": name})
        return self

    def hide_routes(self, match: Mapping[str, object]) -> None:
        """Put a route to another cluster before the route to the replicas."""
        self.add_cluster("web").routes.insert(0, CATCH_ALL | {"match": match})

    def add_listener(self) -> Self:
        """Add a listener that does not ask the router, such as one of metrics."""
        manager = {key: self.manager[key] for key in ("@type", "stat_prefix", "route_config")}
        filters = [{"name": "http", "typed_config": manager | {"http_filters": self.filters[-1:]}}]
        listeners = self.tree["static_resources"]["listeners"]
        listeners.append({"name": "other", "filter_chains": [{"filters": filters}]})
        return self

    def add_enabled_ext_proc(self) -> Self:
        config = {**self.ext_proc, "message_timeout": "0.5s"}
        self.filters.insert(0, {"name": "other", "typed_config": config})
        return self

    def add_listener_with_ext_proc(self, route: Mapping[str, object], **entry: object) -> Self:
        """Add a listener whose only ext_proc filter asks another server; ``entry``: more fields
        of the filter's entry."""
        self.add_listener().add_cluster("web")
        listener = self.tree["static_resources"]["listeners"][-1]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        hosts = [{**self.host, "routes": [route]}]
        manager.update(stream_idle_timeout="5s", route_config={"virtual_hosts": hosts})
        manager["common_http_protocol_options"] = {"headers_with_underscores_action": "DROP_HEADER"}
        config = {"@type": self.ext_proc["@type"]}
        filters = manager["http_filters"]
        filters.insert(0, {"name": "other", "typed_config": config, **entry})
        return self

    def add_other_ext_proc(self) -> Self:
        """Add a filter that asks another server, for one route to another cluster."""
        config = {**self.ext_proc, "failure_mode_allow": False, "processing_mode": {}}
        self.filters.insert(0, {"name": "other", "typed_config": config, "disabled": True})
        settings = {"other": {"@type": FILTER_CONFIG, "config": {}}}
        self.add_cluster("web").routes.append({**WEB, "typed_per_filter_config": settings})
        return self

    def copy_listener(self, without: int) -> Self:
        listener = copy.deepcopy(self.listener) | {"name": "second"}
        del listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"][without]
        self.tree["static_resources"]["listeners"].append(listener)
        return self

    def take_listeners(self) -> Self:
        """Let Envoy take listeners and clusters from files, too."""
        self.tree["dynamic_resources"] = bootstrap(GOOD, Path("/live"))["dynamic_resources"]
        return self

    def original_dst(self, **config: object) -> None:
        del self.replicas["load_balancing_policy"], self.replicas["load_assignment"]
        self.replicas.update(
            type="ORIGINAL_DST", lb_policy="CLUSTER_PROVIDED", original_dst_lb_config=config
        )

    def skip_responses(self) -> Self:
        mode = {**self.mode, "response_header_mode": "SKIP"}
        marked = {"name": "x-extproc-response-skipped", "present_match": True}
        match = {"prefix": "/", "headers": [marked]}
        match_and_mode = {"match": match, **override(processing_mode=mode)}
        self.routes.insert(0, {**self.routes[0], **match_and_mode})
        return self

    def keep_forged_mark(self) -> Self:
        self.removed_headers.remove({"remove": "x-extproc-response-skipped"})
        return self

    def send_header(self, header: str) -> Self:
        self.ext_proc["request_attributes"].append(f"request.headers['{header}']")
        return self

    def underscores(self, action: str) -> Self:
        self.manager["common_http_protocol_options"]["headers_with_underscores_action"] = action
        return self

    def set_transport(self, config: Mapping[str, object]) -> Self:
        self.router["transport_socket"] = {"name": "transport", "typed_config": config}
        return self

    def removing_filter(self, header: str) -> dict[str, Any]:
        filter: dict[str, Any] = copy.deepcopy(self.filters[2])
        filter["typed_config"]["mutations"]["request_mutations"] = [{"remove": header}]
        return filter

    def headers_first(self) -> Self:
        """Send headers first, and let the cluster read the header that the answer sets."""
        self.mode["request_header_mode"] = "SEND"
        self.override["override_host_sources"] = [{"header": DESTINATION}]
        ext_proc, _, removing, router = self.filters
        self.filters[:] = [removing, ext_proc, router]
        return self


def dump_of(
    bootstrap: Mapping[str, Any], clusters: Iterable[Mapping[str, Any]], **listeners: object
) -> dict[str, Any]:
    """Return the dump of a running Envoy; ``listeners``: further lists of listeners."""
    (listener,) = bootstrap["static_resources"]["listeners"]
    types = "type.googleapis.com/envoy.admin.v3."
    cluster = {"@type": f"type.googleapis.com/{CLUSTER}"}
    parts: dict[str, dict[str, Any]] = {
        "BootstrapConfigDump": {"bootstrap": bootstrap},
        "ListenersConfigDump": {"static_listeners": [{"listener": listener}], **listeners},
        "ClustersConfigDump": {
            "static_clusters": [{"cluster": {**cluster, **each}} for each in clusters]
        },
    }
    return {"configs": [{"@type": f"{types}{name}", **part} for name, part in parts.items()]}


FILTER_CONFIG = "type.googleapis.com/envoy.config.route.v3.FilterConfig"
PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"


def per_filter(kind: str = FILTER_CONFIG, **config: object) -> dict[str, object]:
    named = {"envoy.filters.http.ext_proc": {"@type": kind, **config}}
    return {"typed_per_filter_config": named}


def override(**overrides: object) -> dict[str, object]:
    return per_filter(PER_ROUTE, overrides=overrides)


WHOLE_BODY = {"request_body_mode": "BUFFERED"}
CATCH_ALL = {"match": {"prefix": "/"}, "route": {"cluster": "web"}}
WEB = {"match": {"prefix": "/web"}, "route": {"cluster": "web"}}
BUFFER_PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.BufferPerRoute"
NO_BUFFER, BUFFERED = (
    {
        "typed_per_filter_config": {
            "envoy.filters.http.buffer": {"@type": BUFFER_PER_ROUTE, **config}
        }
    }
    for config in ({"disabled": True}, {"buffer": {"max_request_bytes": 2**26}})
)

Settings = dict[str, Any]
SINGLE_CHOICE: Settings = {"serve": {"second_choice": False}}  # fits every cluster
NAMED: Settings = {
    "route": {"policy_header": "x-extproc-policy", "session_cookie": "sid"},
    "request": {"tenant_header": "X-Tenant"},
}
UNDERSCORE: Settings = {"request": {"tenant_header": "x_tenant"}}
PRIORITIES: Settings = {"hold": {"objectives": {"urgent": {"priority": 1, "tenants": ["a"]}}}}
DECISIONS: Settings = {"serve": {"decision_metadata": True}}
REPLICAS: Settings = {"replicas": ["10.0.0.1:8000", "http://10.0.0.2:8000"]}
TLS: Settings = {"serve": {"tls_cert": "tls.crt", "tls_key": "tls.key"}}
_TRANSPORTS = "type.googleapis.com/envoy.extensions.transport_sockets"
UPSTREAM_TLS = {"@type": f"{_TRANSPORTS}.tls.v3.UpstreamTlsContext", "sni": "router"}
WRAPPED_TLS = {
    "@type": f"{_TRANSPORTS}.proxy_protocol.v3.ProxyProtocolUpstreamTransport",
    "transport_socket": {"name": "tls", "typed_config": UPSTREAM_TLS},
}


def complaints(tree: object, settings: Settings = SINGLE_CHOICE) -> list[Finding]:
    findings = check_envoy(tree, Config.model_validate(settings))
    return [finding for finding in findings if finding.level is not Level.OK]


def changed(change: Breakage) -> dict[str, Any]:
    editable = EditableBootstrap()
    change(editable)
    return editable.tree


def row(
    level: Level, rule: str, words: str, breakage: Breakage, settings: Settings = SINGLE_CHOICE
) -> Any:
    return pytest.param(rule, level, words, breakage, settings, id=rule)


error, warning = partial(row, Level.ERROR), partial(row, Level.WARNING)


@pytest.mark.parametrize("name", ["envoy.yaml", "ext_proc.yaml", "api_only.yaml"])
def test_shipped_files_pass_every_rule(name: str) -> None:
    findings = check_envoy(read_yaml(ENVOY / name))
    unjudged = UNJUDGED | (ONLY_IN_WHOLE_FILES if name == "ext_proc.yaml" else set())
    rules = {rule.id for rule in RULES} | {"is_complete"}
    judged = {finding.rule for finding in findings}
    assert judged - BY_HOST == rules - unjudged - BY_HOST
    assert len(judged & BY_HOST) == 1
    assert {finding.level for finding in findings} == {Level.OK}


@pytest.mark.parametrize("path", sorted(ENVOY.glob("*.yaml")), ids=lambda path: path.stem)
def test_command_accepts_every_shipped_file(
    path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in re.findall("Router: (EXTPROC_.*)=(.*)", path.read_text(encoding="utf-8")):
        monkeypatch.setenv(name, value)
    assert str(path) in cli("check", "--envoy", path)[0]


@pytest.mark.parametrize(
    ("tree", "rule", "level", "words"),
    [
        *((tree, "is_envoy", Level.ERROR, "not an Envoy file")
          for tree in (None, [], {}, [1, 2], {"a": 1}, "text", [{"name": "x"}])),
        (read_yaml(ENVOY / "envoy_gateway.yaml"), "is_envoy", Level.WARNING, "not checked"),
        (changed(lambda b: b.filters.pop(0)), "has_ext_proc", Level.ERROR, "never asks the router"),
        (bootstrap(GOOD, Path("/live")), "has_ext_proc", Level.WARNING,
         "the file that lds_config names"),
        (dump_of(changed(lambda b: (b.filters.pop(0), b.take_listeners())), []), "has_ext_proc",
         Level.ERROR, "never asks the router"),
        ({"http_filters": EditableBootstrap().filters}, "is_complete", Level.WARNING,
         "has no listener and no route and no cluster"),
        (read_yaml(ENVOY / "istio.yaml"), "is_complete", Level.WARNING, "no route"),
        (read_yaml(ENVOY / "original_dst.yaml"), "serves_without_router", Level.WARNING, "503"),
    ],
)  # fmt: skip
def test_kind_or_missing_part_of_file_is_only_finding(
    tree: object, rule: str, level: Level, words: str
) -> None:
    (finding,) = complaints(tree)
    assert (finding.rule, finding.level) == (rule, level)
    assert words in finding.text


def test_endpoint_picker_has_no_findings() -> None:
    assert not complaints(read_yaml(ENVOY / "endpoint_picker.yaml"))


def test_documented_route_of_pool_has_no_findings() -> None:
    page = (ENVOY.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(routes:\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (route,) = yaml.safe_load(block)["routes"]
    editable = EditableBootstrap()
    editable.routes.insert(0, route)
    editable.clusters.append(editable.replicas | {"name": route["route"]["cluster"]})
    assert complaints(editable.tree) == []


def test_original_dst_needs_single_choice() -> None:
    finding, *_ = complaints(read_yaml(ENVOY / "original_dst.yaml"), {})
    assert (finding.rule, finding.level) == ("one_replica_is_named", Level.ERROR)
    assert "Set serve.second_choice: false" in finding.text


def test_endpoint_picker_has_single_choice_by_default() -> None:
    def duplex(b: EditableBootstrap) -> None:
        b.original_dst()
        b.mode["request_body_mode"] = "FULL_DUPLEX_STREAMED"

    assert "one_replica_is_named" not in {
        finding.rule for finding in complaints(changed(duplex), {})
    }


BREAKAGES = [
    error("requests_wait", "SEND", lambda b: b.filters.pop(1)),
    error("requests_wait", "envoy.filters.http.buffer",
     lambda b: b.filters.insert(0, b.filters.pop(1))),
    error("requests_wait", "SEND", lambda b: b.copy_listener(without=1)),
    error("routes_wait", "buffer is disabled", lambda b: b.routes[0].update(NO_BUFFER)),
    error("routes_wait", "buffer is disabled", lambda b: b.host.update(NO_BUFFER)),
    error("routes_wait", "buffer is disabled",
     lambda b: b.split({"name": "replicas", **NO_BUFFER})),
    error("routes_wait", "buffer is disabled", lambda b: b.filters[1].update(disabled=True)),
    error("routes_wait", "buffer is disabled",
     lambda b: b.add_enabled_ext_proc().routes[0].update(typed_per_filter_config={
         **NO_BUFFER["typed_per_filter_config"],
         "other": {"@type": PER_ROUTE,
             "overrides": {"processing_mode": {**b.mode, "request_header_mode": "SEND"}}}})),
    error("headers_come_with_body", "request.path", lambda b: b.ext_proc.pop("request_attributes")),
    error("headers_come_with_body", "lacks request.headers['content-encoding']:",
     lambda b: b.ext_proc.update(request_attributes=["request.path"])),
    error("cluster_reads_metadata", "SEND",
     lambda b: b.override.update(override_host_sources=[{"header": DESTINATION}])),
    warning("large_bodies_are_buffered", "413",
     lambda b: b.filters[1]["typed_config"].update(max_request_bytes=2**20)),
    error("body_is_buffered", "NONE", lambda b: b.mode.pop("request_body_mode")),
    error("body_is_buffered", "STREAMED", lambda b: b.mode.update(request_body_mode="STREAMED")),
    error("response_headers_are_sent", "SKIP",
     lambda b: b.mode.update(response_header_mode="SKIP")),
    error("response_headers_are_sent", "Add request.headers['x-extproc-response-skipped']",
     lambda b: (b.skip_responses(),
         b.ext_proc["request_attributes"].remove("request.headers['x-extproc-response-skipped']"))),
    warning("response_attributes_are_sent", "lacks upstream.address, upstream.request_attempt",
     lambda b: b.ext_proc.pop("response_attributes")),
    warning("response_attributes_are_sent", "lacks response.flags:",
     lambda b: b.ext_proc["response_attributes"].remove("response.flags")),
    warning("allows_sampling", "allow_mode_override: true",
     lambda b: b.ext_proc.pop("allow_mode_override")),
    error("fails_open", "failure_mode_allow: true",
     lambda b: b.ext_proc.update(failure_mode_allow=False)),
    warning("message_timeout_is_short", "30 s", lambda b: b.ext_proc.update(message_timeout="30s")),
    error("forged_destination_is_removed", "header_mutation",
     lambda b: b.headers_first().filters.pop(0)),
    error("forged_destination_is_removed", "before",
     lambda b: b.headers_first().filters.insert(1, b.filters.pop(0))),
    error("forged_destination_is_removed", "before",
     lambda b: b.headers_first().copy_listener(without=0)),
    warning("forged_mark_is_removed", "early_header_mutation", EditableBootstrap.keep_forged_mark),
    error("replica_cluster_obeys", f"sources: {FROM_METADATA}",
     lambda b: b.replicas.pop("load_balancing_policy")),
    error("replica_cluster_obeys", f"sources: [{{header: {DESTINATION}}}]",
     lambda b: (b.headers_first(), b.replicas.pop("load_balancing_policy"))),
    error("replica_cluster_obeys", "ignores",
     lambda b: (b.replicas.pop("load_balancing_policy"), b.replicas.update(type="ORIGINAL_DST"))),
    error("no_header_chooses_any_address", "use_http_header",
     lambda b: b.headers_first().original_dst(use_http_header=True, http_header_name=DESTINATION)),
    warning("serves_without_router", "503 while the router is down, and always to",
     lambda b: b.original_dst(metadata_key={"key": "envoy.lb", "path": [{"key": DESTINATION}]})),
    error("override_source_is_known", f"sources: {FROM_METADATA}",
     lambda b: b.override.update(override_host_sources=[{"header": "x-other"}])),
    error("metadata_is_received", "envoy.lb", lambda b: b.ext_proc.pop("metadata_options")),
    warning("metadata_is_forwarded", "forwarding_namespaces: {untyped: [envoy.lb]}",
     lambda b: b.ext_proc["metadata_options"].pop("forwarding_namespaces")),
    error("has_fallback", "least_request", lambda b: b.override.pop("fallback_policy")),
    error("members_are_addresses", "LOGICAL_DNS", lambda b: b.replicas.update(type="LOGICAL_DNS")),
    error("members_are_addresses", "in_single_endpoint", lambda b: b.resolve(as_one=True)),
    error("router_speaks_http2", "HTTP/2",
     lambda b: b.router.pop("typed_extension_protocol_options")),
    warning("limits_are_raised", "'router'", lambda b: b.router.pop("circuit_breakers")),
    warning("limits_are_raised", "max_requests (1024)",
     lambda b: b.replicas["circuit_breakers"]["thresholds"][0].update(max_requests=1024)),
    warning("large_bodies_pass", "413",
     lambda b: b.listener.pop("per_connection_buffer_limit_bytes")),
    error("responses_may_be_long", "15 s", lambda b: b.route.pop("timeout")),
    error("responses_may_be_long", "60 s", lambda b: b.route.update(timeout="60s")),
    warning("responses_may_be_silent", "5 min", lambda b: b.manager.pop("stream_idle_timeout")),
    warning("second_choice_is_tried", "on connect-failure, status 500, status 401, status 403:",
     lambda b: b.route.pop("retry_policy")),
    error("router_cluster_exists", "'ruoter'",
     lambda b: b.ext_proc["grpc_service"]["envoy_grpc"].update(cluster_name="ruoter")),
    error("router_cluster_exists", "names no cluster", lambda b: b.ext_proc.pop("grpc_service")),
    error("filter_is_enabled", "disabled", lambda b: b.filters[0].update(disabled=True)),
    error("filter_is_enabled", "no route enables it",
     lambda b: (b.filters[0].update(disabled=True), b.routes[0].update(per_filter(disabled=True)))),
    error("filter_is_enabled", "disabled",
     lambda b: b.add_enabled_ext_proc().filters[1].update(disabled=True)),
    warning("router_is_health_checked", "hangs", lambda b: b.router.pop("health_checks")),
    warning("new_router_is_asked_soon", "no_traffic_interval: 0.5s",
     lambda b: b.router["health_checks"][0].pop("no_traffic_interval")),
    error("response_end_is_sent", "response_trailer_mode: SEND",
     lambda b: b.mode.update(request_body_mode="FULL_DUPLEX_STREAMED",
         request_trailer_mode="SEND", response_trailer_mode="SKIP")),
    warning("vanished_replicas_are_noticed", "has no tcp_keepalive",
     lambda b: b.replicas.pop("upstream_connection_options")),
    warning("limits_are_raised", "max_retries (3)",
     lambda b: b.replicas["circuit_breakers"]["thresholds"][0].pop("max_retries")),
    error("routes_ask_router", "Remove disabled: true",
     lambda b: b.routes[0].update(per_filter(PER_ROUTE, disabled=True))),
    error("routes_ask_router", "virtual host",
     lambda b: b.host.update(per_filter(PER_ROUTE, disabled=True))),
    error("routes_ask_router", "disabled", lambda b: b.host.update(per_filter(disabled=True))),
    error("routes_ask_router", "disabled",
     lambda b: b.host.update(per_filter(config={"@type": PER_ROUTE, "disabled": True}))),
    error("routes_ask_router", "weighted clusters",
     lambda b: b.split({"name": "replicas", **per_filter(PER_ROUTE, disabled=True)})),
    error("routes_ask_router", "disabled",
     lambda b: (b.filters[0].update(disabled=True),
         b.routes.append({"match": {"prefix": "/x"}, "redirect": {}, **override()}))),
    error("body_is_buffered", "NONE",
     lambda b: b.routes[0].update(override(processing_mode={"request_body_mode": "NONE"}))),
    error("body_is_buffered", "NONE",
     lambda b: b.host.update(override(processing_mode={"response_body_mode": "STREAMED"}))),
    error("fails_open", "fails", lambda b: b.routes[0].update(override(failure_mode_allow=False))),
    warning("second_choice_is_tried", "not retry on anything (num_retries: 0)",
     lambda b: b.route["retry_policy"].update(num_retries=0)),
    warning("second_choice_is_tried", "not retry on status 500, status 401, status 403:",
     lambda b: b.route["retry_policy"].update(retry_on="connect-failure,reset")),
    warning("second_choice_is_tried", "not retry on status 401, status 403:",
     lambda b: b.route["retry_policy"].update(retriable_status_codes=[500, 502, 503])),
    warning("second_choice_is_tried", "not retry on status 401, status 403:",
     lambda b: b.route["retry_policy"].update(retry_on="connect-failure,5xx")),
    error("first_tokens_may_wait", "stream_idle_timeout is 1 s",
     lambda b: b.manager.update(stream_idle_timeout="1s")),
    error("first_tokens_may_wait", "idle_timeout is 0.5 s",
     lambda b: b.route.update(idle_timeout="0.5s")),
    error("routes_lead_to_replicas", "'mistyped', a cluster that the file lacks",
     lambda b: b.route.update(cluster="mistyped")),
    error("routes_lead_to_replicas", "'other', which ignores",
     lambda b: (b.add_cluster("other"), b.route.update(cluster="other"))),
    error("routes_lead_to_replicas", "Write cluster: 'replicas'",
     lambda b: (b.add_cluster("other"), b.split({"name": "replicas"}, {"name": "other"}))),
    error("routes_can_match", "routes[0], before it in the virtual host, takes every request",
     lambda b: b.routes.append(b.routes[0])),
    *(error("routes_can_match", "Move that route to the end",
       partial(EditableBootstrap.hide_routes, match=match))
      for match in ({"prefix": "/"}, {"prefix": ""}, {"safe_regex": {"regex": ".*"}})),
    error("headers_come_with_body", "lacks request.headers['cookie'], request.headers['x-tenant']:",
     lambda b: None, NAMED),  # the shipped file has the header of route.policy_header
    error("named_headers_arrive", "is DROP_HEADER, and the router's settings name x_tenant: ",
     lambda b: b.send_header("x_tenant"), UNDERSCORE),
    error("named_headers_arrive", "is REJECT_REQUEST, and the router's settings name x_tenant: ",
     lambda b: b.send_header("x_tenant").underscores("REJECT_REQUEST"), UNDERSCORE),
    warning("forged_priority_is_removed", "early_header_mutation",
     lambda b: b.removed_headers.remove({"remove": "x-vllm-priority"}), PRIORITIES),
    warning("forged_rank_is_removed", "x-data-parallel-rank",
     lambda b: b.removed_headers.remove({"remove": "x-data-parallel-rank"})),
    warning("decision_metadata_is_received", "Add extproc to", lambda b: None, DECISIONS),
    warning("requests_can_queue", "is 60 s: while replicas are full",
     lambda b: b.ext_proc.update(max_message_timeout="60s")),
    warning("requests_can_queue", "is 0 s: while replicas are full",
     lambda b: b.ext_proc.pop("max_message_timeout")),
    warning("requests_can_queue", "Write max_message_timeout: 301s", lambda b: None,
     {"hold": {"longest_s": 301}}),
    error("router_port_matches", "port 50051, and the router listens at 6000",
     lambda b: b.address_router("10.0.0.9"), {"serve": {"listen": "0.0.0.0:6000"}}),
    error("router_port_matches", "port 0, and the router listens at 50051",
     lambda b: b.address_router("10.0.0.9").name_port(b.router)),
    warning("mapped_port_leads_to_router", "unless a Service maps this port",
     lambda b: None, {"serve": {"listen": "0.0.0.0:6000"}}),
    warning("observer_is_not_awaited", "Take the filter of envoy/observe.yaml", lambda b: None,
     {"serve": {"mode": "observe"}}),
    error("observed_requests_are_served", "they get 503",
     lambda b: b.original_dst(metadata_key={"key": "envoy.lb", "path": [{"key": DESTINATION}]}),
     {"serve": {"share": 0.05, "second_choice": False}}),
    error("placeholder_is_replaced", "the placeholder vllm.example",
     lambda b: b.list_replicas("vllm.example"), REPLICAS),
    error("members_are_replicas", "lists 10.0.0.3:8000, 10.0.0.4:8000, and",
     lambda b: b.list_replicas("10.0.0.3", "10.0.0.4"), REPLICAS),
    error("members_are_replicas", "lists 10.0.0.1:0, and",
     lambda b: b.list_replicas("10.0.0.1").name_port(b.replicas), REPLICAS),
    error("transport_matches", "'router' speaks plain text, but", lambda b: None, TLS),
    error("transport_matches", "'router' speaks TLS, but this configuration",
     lambda b: b.set_transport(UPSTREAM_TLS)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "level", "words", "breakage", "settings"), BREAKAGES)
def test_broken_rule_is_only_finding(
    rule: str, level: Level, words: str, breakage: Breakage, settings: Settings
) -> None:
    (finding,) = complaints(changed(breakage), settings)
    assert (finding.rule, finding.level) == (rule, level)
    assert words in finding.text
    assert finding.where


def test_findings_say_that_shipped_files_are_in_the_repository() -> None:
    """An installed package has no folder ``envoy``."""
    findings = [*complaints({}), *complaints(changed(lambda b: b.filters.pop(0)))]
    texts = [each.text for each in findings] + [rule.text for rule in (*RULES, *OBSERVER_RULES)]
    named = re.findall(r"envoy/\w+\.yaml(.{28})", " ".join(texts))
    assert {*named} == {" of the project's repository"}


def test_every_rule_has_a_breakage() -> None:
    assert {rule.id for rule in RULES} == {row.id for row in BREAKAGES} | {"one_replica_is_named"}


INAPPLICABLE: list[tuple[str, str, Breakage]] = [
    ("replica_cluster_obeys", "cluster_reads_metadata",
     lambda b: b.replicas.pop("load_balancing_policy")),
    ("replica_cluster_obeys", "metadata_is_received",
     lambda b: b.replicas.pop("load_balancing_policy")),
    ("override_source_is_known", "cluster_reads_metadata",
     lambda b: b.override.update(override_host_sources=[{"header": "x-other"}])),
    ("filter_is_enabled", "routes_ask_router", lambda b: b.filters[0].update(disabled=True)),
    ("requests_wait", "routes_wait", lambda b: b.filters.pop(1)),
]  # fmt: skip


@pytest.mark.parametrize(("broken", "rule", "breakage"), INAPPLICABLE)
def test_rule_that_another_mistake_makes_inapplicable_is_not_ok(
    broken: str, rule: str, breakage: Breakage
) -> None:
    judged = {finding.rule for finding in check_envoy(changed(breakage))}
    assert broken in judged
    assert rule not in judged


DENIED = [
    ("never asks the router", "(asks the router|pass the ext_proc filter|router (gets|sees))"),
    ("ignores the router's choice|takes none from", "(go where the router says|has an effect)"),
    ("leaves? before the router has", "before the request leaves"),
    ("fails? while the router is down", "while the router is down"),
    ("cuts a request", "No idle timeout cuts"),
    ("gets 413", "Bodies .* are accepted"),
]
"""Words of a finding, and words with which an OK would deny the finding."""


@pytest.mark.parametrize(("found", "denial"), DENIED)
def test_no_ok_denies_a_finding(found: str, denial: str) -> None:
    for *_, breakage, settings in (row.values for row in BREAKAGES):
        findings = check_envoy(changed(breakage), Config.model_validate(settings))
        bad = [each.text for each in findings if each.level is not Level.OK]
        if any(re.search(found, text) for text in bad):
            good = [each.text for each in findings if each.level is Level.OK]
            assert not [text for text in good if re.search(denial, text)], bad


ALLOWED: list[Breakage] = [
    lambda b: b.mode.update(request_body_mode="FULL_DUPLEX_STREAMED", request_trailer_mode="SEND"),
    lambda b: b.ext_proc.update(grpc_service={"google_grpc": {"target_uri": "router:50051"}}),
    lambda b: b.tree.update(dynamic_resources={"cds_config": {"ads": {}}}) or b.clusters.pop(0),
    lambda b: (b.route.pop("cluster"), b.route.update(cluster_header="x-cluster")),
    lambda b: (b.filters[0].update(disabled=True), b.routes[0].update(per_filter(config={}))),
    lambda b: b.replicas["circuit_breakers"]["thresholds"][0].update(max_retries=None,
     retry_budget={"budget_percent": {"value": 50}}),
    lambda b: b.ext_proc.pop("message_timeout"),
    lambda b: b.headers_first(),
    lambda b: b.skip_responses(),
    lambda b: b.route.update(timeout="3600s"),
    lambda b: (b.manager.pop("stream_idle_timeout"), b.route.update(idle_timeout="0s")),
    lambda b: b.replicas.update(type="EDS", eds_cluster_config={"eds_config": {"ads": {}}}),
    lambda b: b.resolve(as_one=False),
    lambda b: b.add_router(50052),
    lambda b: b.address_router("127.0.0.1").add_router(50052),
    lambda b: b.add_cluster("elsewhere"),
    lambda b: (b.route.update(cluster="by_cds"), b.clusters.pop(),
     b.tree.update(dynamic_resources={"cds_config": {"ads": {}}})),
    lambda b: b.add_listener(),
    lambda b: b.add_other_ext_proc(),
    lambda b: b.add_listener_with_ext_proc(CATCH_ALL),
    lambda b: b.add_listener_with_ext_proc(b.routes[0], disabled=True),
    lambda b: (b.add_cluster("web"), b.routes.append(WEB)),
    lambda b: b.routes.insert(0, {**b.routes[0], "match": {"prefix": "/", "grpc": {}}}),
    lambda b: (b.add_cluster("web"), b.routes.append(CATCH_ALL)),
    lambda b: b.split({"name": "replicas"}),
    lambda b: (b.manager.update(stream_idle_timeout="0s"), b.route.update(idle_timeout="120s")),
    lambda b: (b.manager.update(stream_idle_timeout="1s"), b.route.update(idle_timeout="0s")),
    lambda b: b.route["retry_policy"].pop("num_retries"),
    lambda b: b.host.update(retry_policy=b.route.pop("retry_policy")),
    lambda b: b.route["retry_policy"].update(
        retry_on="5xx, retriable-status-codes", retriable_status_codes=[401, 403]),
    lambda b: b.route["retry_policy"].update(retry_on="gateway-error,retriable-status-codes"),
    lambda b: b.route["retry_policy"].update(retry_on="reset,retriable-status-codes"),
    lambda b: b.routes[0].update(override(processing_mode=WHOLE_BODY)),
    lambda b: b.routes[0].update(override(failure_mode_allow=True)),
    lambda b: (b.host.update(NO_BUFFER), b.routes[0].update(BUFFERED)),
    lambda b: (b.filters[1].update(disabled=True), b.routes[0].update(BUFFERED)),
    lambda b: (b.host.update(NO_BUFFER),
     b.routes[0].update(override(processing_mode={**b.mode, "request_header_mode": "SEND"}))),
    lambda b: (b.host.update(per_filter(PER_ROUTE, disabled=True)),
     b.routes[0].update(override(processing_mode=WHOLE_BODY))),
    lambda b: (b.add_cluster("web"),
     b.routes.append(WEB | override(processing_mode={})),
     b.routes.append(WEB | per_filter(PER_ROUTE, disabled=True))),
    lambda b: (b.headers_first().filters.pop(0),
     b.removed_headers.append({"remove": "X-Gateway-Destination-Endpoint"})),
    lambda b: (b.keep_forged_mark(), b.ext_proc["request_attributes"].remove(SKIPPED)),
    lambda b: (
        b.keep_forged_mark(),
        b.filters.insert(0, b.removing_filter("x-extproc-response-skipped"))),
    lambda b: (
        b.keep_forged_mark(),
        b.filters.insert(0, b.removing_filter("x-extproc-response-skipped")),
        b.add_other_ext_proc()),
]  # fmt: skip


@pytest.mark.parametrize("change", ALLOWED)
def test_equivalent_configuration_has_no_findings(change: Breakage) -> None:
    assert complaints(changed(change)) == []


JUDGED: list[tuple[str, bool, Settings, Breakage]] = [
    ("headers_come_with_body", True, NAMED,
     lambda b: b.send_header("cookie").send_header("x-tenant")),
    ("headers_come_with_body", False, NAMED, EditableBootstrap.headers_first),
    ("named_headers_arrive", True, UNDERSCORE,
     lambda b: b.send_header("x_tenant").underscores("ALLOW")),
    ("named_headers_arrive", True, UNDERSCORE,
     lambda b: b.send_header("x_tenant").underscores("ALLOW").add_listener_with_ext_proc(
         CATCH_ALL)),
    ("named_headers_arrive", True, UNDERSCORE,
     lambda b: (b.send_header("x_tenant"), b.manager.pop("common_http_protocol_options"))),
    ("forged_priority_is_removed", True, PRIORITIES, lambda b: None),
    ("forged_priority_is_removed", False, PRIORITIES,
     lambda b: (b.headers_first(), b.removed_headers.remove({"remove": "x-vllm-priority"}))),
    ("forged_rank_is_removed", True, {}, lambda b: None),
    ("forged_rank_is_removed", False, {},
     lambda b: (b.headers_first(), b.removed_headers.remove({"remove": "x-data-parallel-rank"}))),
    ("forged_priority_is_removed", False, SINGLE_CHOICE,
     lambda b: b.removed_headers.remove({"remove": "x-vllm-priority"})),
    ("decision_metadata_is_received", True, DECISIONS, lambda b: b.namespaces.append("extproc")),
    ("requests_can_queue", True, {"hold": {"longest_s": 60}},
     lambda b: b.ext_proc.update(max_message_timeout="60s")),
    ("requests_can_queue", False, {"hold": {"longest_s": 0}},
     lambda b: b.ext_proc.pop("max_message_timeout")),
    ("placeholder_is_replaced", True, REPLICAS, lambda b: b.list_replicas("vllm.internal")),
    ("placeholder_is_replaced", False, {}, lambda b: b.list_replicas("vllm.example")),
    ("members_are_replicas", True, REPLICAS, lambda b: b.list_replicas("10.0.0.2", "10.0.0.3")),
    *(("members_are_replicas", False, settings, lambda b: b.list_replicas("10.0.0.3"))
      for settings in (
          {},
          {"replicas": ["vllm.internal:8000"]},
          {"replicas": [{"dns": "vllm.internal:8000"}]},
          REPLICAS | {"replicas_file": "replicas.yaml"},
          REPLICAS | {"pools": {"b": {"replicas": ["vllm.internal:8000"]}}},
      )),
    ("members_are_replicas", False, REPLICAS, lambda b: b.list_replicas("10.0.0.3", "fast")),
    ("transport_matches", True, TLS, lambda b: b.set_transport(UPSTREAM_TLS)),
    ("transport_matches", True, TLS, lambda b: b.set_transport(WRAPPED_TLS)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "judged", "settings", "change"), JUDGED)
def test_rule_applies_only_with_its_settings(
    rule: str, judged: bool, settings: Settings, change: Breakage
) -> None:
    findings = check_envoy(changed(change), Config.model_validate(settings))
    assert {finding.level for finding in findings} == {Level.OK}
    assert any(finding.rule == rule for finding in findings) is judged


MISSPELT: list[tuple[str, str, Breakage]] = [
    ("processing_mode.request_body_mode", "BUFERED",
     lambda b: b.mode.update(request_body_mode="BUFERED")),
    ("processing_mode.request_body_mode", "1024 is not a value",
     lambda b: b.mode.update(request_body_mode=1024)),
    ("static_resources.clusters[0].connect_timeout", "soon",
     lambda b: b.router.update(connect_timeout="soon")),
    ("routes[0].route.timeout", "must be a duration, such as 1s, not 0",
     lambda b: b.route.update(timeout=0)),
    ("static_resources.clusters[1].circuit_breakers", "must hold the fields",
     lambda b: b.replicas.update(circuit_breakers=3)),
    ("static_resources.clusters[1].health_checks", "must hold a list",
     lambda b: b.replicas.update(health_checks={"timeout": "1s"})),
    ("clusters[1].metadata.filter_metadata.envoy.lb", "must hold keys and values, not 'canary'",
     lambda b: b.replicas.update(metadata={"filter_metadata": {"envoy.lb": "canary"}})),
    ("load_balancing_policy.policies[0]", "null",
     lambda b: b.replicas.update(load_balancing_policy={"policies": [None]})),
    ("static_resources.clusters[2]", "null", lambda b: b.clusters.append(None)),
    ("http_filters[4]", "null", lambda b: b.filters.append(None)),
    ("response_attributes", "string", lambda b: b.ext_proc.update(response_attributes=[None])),
    ("failure_mode_allow", "boolean", lambda b: b.ext_proc.update(failure_mode_allow="perhaps")),
    ("routes[0].route", "cluster_specifier has more than one value",
     lambda b: b.route.update(cluster_header="x-a")),
]  # fmt: skip


@pytest.mark.parametrize(("place", "words", "breakage"), MISSPELT)
def test_breach_of_schema_names_place(place: str, words: str, breakage: Breakage) -> None:
    (finding,) = complaints(changed(breakage))
    assert (finding.rule, finding.level) == ("schema", Level.ERROR)
    assert place in finding.where
    assert words in finding.text


def test_unknown_field_is_warning_beside_rules() -> None:
    """A newer Envoy has fields that the schema lacks."""
    with_field = changed(lambda b: b.mode.update(request_bdy_mode="BUFFERED"))
    (finding,) = complaints(with_field)
    assert (finding.rule, finding.level) == ("schema", Level.WARNING)
    assert finding.where.endswith("processing_mode.request_bdy_mode")
    assert "did you mean 'request_body_mode'?" in finding.text
    assert len(check_envoy(with_field)) == len(check_envoy(changed(lambda b: None))) + 1


def test_unknown_type_is_warning() -> None:
    filter = {"name": "x", "typed_config": {"@type": "type.googleapis.com/acme.v1.Filter", "a": 1}}
    (finding,) = complaints(changed(lambda b: b.filters.insert(0, filter)))
    assert (finding.rule, finding.level) == ("schema", Level.WARNING)
    assert "acme.v1.Filter" in finding.text


@pytest.mark.parametrize("kind", ["rbac.v3.RBAC", "fault.v3.HTTPFault", "ip_tagging.v3.IPTagging"])
def test_type_with_acronym_is_known(kind: str) -> None:
    typed = {"@type": f"type.googleapis.com/envoy.extensions.filters.http.{kind}"}
    filter = {"name": "x", "typed_config": typed}
    assert complaints(changed(lambda b: b.filters.insert(0, filter))) == []


def test_typed_struct_is_checked() -> None:
    good = EditableBootstrap()
    fields = dict(good.ext_proc)
    del fields["failure_mode_allow"]
    struct = {"type_url": fields.pop("@type"), "value": fields}
    kind = "type.googleapis.com/xds.type.v3.TypedStruct"
    good.filters[0]["typed_config"] = {"@type": kind, **struct}
    finding, *_ = complaints(good.tree)
    assert (finding.rule, finding.level) == ("fails_open", Level.ERROR)


def test_patches_of_istio_envoy_filter_are_checked() -> None:
    good = EditableBootstrap()
    del good.ext_proc["failure_mode_allow"]
    where = {"context": "GATEWAY", "listener": {"filterChain": {"filter": {"name": "hcm"}}}}
    patches = [
        {"applyTo": "HTTP_FILTER", "match": where, "patch": {"operation": "ADD", "value": value}}
        for value in good.filters[:2]
    ]
    patches.append({"applyTo": "CLUSTER", "patch": {"operation": "ADD", "value": good.replicas}})
    wrapped = {
        "apiVersion": "networking.istio.io/v1alpha3",
        "kind": "EnvoyFilter",
        "spec": {"configPatches": patches},
    }
    found = {finding.rule: finding for finding in complaints(wrapped)}
    assert found.keys() == {"fails_open", "is_complete"}
    assert found["fails_open"].where == "spec.configPatches[0].patch.value.typed_config"


def test_field_with_digit_is_read() -> None:
    router = EditableBootstrap().router | {"outlier_detection": {"consecutive_5xx": 7}}
    (cluster,) = EnvoyFile({"clusters": [router]}).all(CLUSTER)
    assert cluster["outlier_detection"]["consecutive_5xx"] == 7


def test_only_parts_of_a_dump_that_are_in_force_are_judged() -> None:
    good, before = EditableBootstrap(), EditableBootstrap()
    del before.ext_proc["failure_mode_allow"]
    old = {"listener": before.listener}
    refused = {"failed_configuration": before.listener, "details": "duplicate address"}
    states = {"draining_state": old, "warming_state": old, "error_state": refused}
    dump = dump_of(good.tree, good.clusters, dynamic_listeners=[{"name": "openai", **states}])
    for tree in (dump, _camel(dump), {"namespace": {"pod": dump}}):
        (finding,) = complaints(tree)
        text = "Envoy refused an update and keeps its old configuration: duplicate address"
        assert (finding.level, finding.text) == (Level.ERROR, text)


def test_camel_case_json_is_read() -> None:
    (finding,) = complaints(_camel(EditableBootstrap().tree | {"staticResourcez": {}}))
    assert "did you mean 'static_resources'?" in finding.text
    assert complaints(_camel(EditableBootstrap().tree)) == []


def _camel(value: Any) -> Any:
    if isinstance(value, list):
        return [_camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key if "." in key or "@" in key else re.sub("_(.)", lambda found: found[1].upper(), key):
        _camel(item) for key, item in value.items()
    }  # fmt: skip


def test_command_prints_worst_first_and_fails_on_error(tmp_path: Path, cli: Cli) -> None:
    def check(path: Path, status: int) -> list[str]:
        argv = "check", "--hold.longest_s", "301", "--envoy", path
        (valid, name, *lines), _ = cli(*argv, status=status)
        assert valid == "The configuration is valid."
        assert name == str(path)
        return lines

    good = check(ENVOY / "envoy.yaml", 0)
    assert "Write max_message_timeout: 301s" in "".join(good)
    levels = [line.split()[0] for line in good]
    assert levels == sorted(levels, reverse=True)
    assert {*levels} == {"warning", "ok"}

    bad = EditableBootstrap()
    bad.filters.pop(1)
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(bad.tree), encoding="utf-8")
    levels = [line.split()[0] for line in check(path, 1)]
    assert list(dict.fromkeys(levels)) == ["error", "warning", "ok"]


@pytest.mark.parametrize("name", ["envoy.yaml", "ext_proc.yaml"])
def test_first_dead_route_is_named(name: str) -> None:
    tree: Any = read_yaml(ENVOY / name)
    host = tree if "routes" in tree else manager_of(tree)["route_config"]["virtual_hosts"][0]
    routes = host["routes"]
    routes.insert(1, routes.pop())
    (finding,) = complaints(tree, {})
    assert finding.rule == "routes_can_match"
    assert finding.where.endswith(f"routes[2].route and {len(routes) - 3} more")
    assert "routes[1], before it" in finding.text


def test_mistake_that_routes_repeat_is_reported_once() -> None:
    tree = copy.deepcopy(GOOD)
    filters = manager_of(tree)["http_filters"]
    ext_proc = next(each for each in filters if each["name"] == "envoy.filters.http.ext_proc")
    del ext_proc["typed_config"]["response_attributes"]
    (finding,) = complaints(tree)
    assert finding.where.endswith(" more")


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("# nothing\n", "extproc.yaml", "empty"),
        ("state: memory\nreplicas: []\n", "pool default", "Set replicas or replicas_file"),
        ("state: memory\npools: {b: {replicas: [a:1]}}", "pool default", "Envoy's fallback"),
        ("replicas: [10.0.0.1:8000, 10.0.0.1:8000]\n", "replica 10.0.0.1:8000", "listed 2 times"),
    ],
)
def test_configuration_that_cannot_work_fails(
    tmp_path: Path, cli: Cli, text: str, where: str, words: str
) -> None:
    file = tmp_path / "extproc.yaml"
    file.write_text(text)
    printed, _ = cli("check", "--config", file, "--json", status=1)
    (finding,) = json.loads("\n".join(printed))
    assert finding["level"] == "error"
    assert finding["where"].endswith(where)
    assert words in finding["text"]


@pytest.mark.parametrize("text", ["a: [", "\0", "a: 2024-13-45", "[" * 1000, "&a [*a]", "\xff"])
def test_invalid_yaml_is_reported_in_one_line(tmp_path: Path, cli: Cli, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode("latin-1"))
    _, (line,) = cli("check", "--envoy", path, status=1)
    assert line.startswith(f"extproc check: {path}: not YAML: ")


def test_redis_password_is_not_shown(cli: Cli) -> None:
    url = "redis://user:hunter2@127.0.0.1:1/1"
    output = "\n".join(cli("check", "--live", "--redis.url", url, status=1)[0])
    assert "redis 127.0.0.1:1: " in output
    assert "hunter2" not in output
