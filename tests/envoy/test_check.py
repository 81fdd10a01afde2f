"""Every rule, on a good file broken in one place."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from envoy_data_plane.envoy.config.cluster.v3 import Cluster

from extproc.cli import main
from extproc.config import Config, ServeSettings
from extproc.envoy.check import check_envoy
from extproc.envoy.envoy_file import EnvoyFile
from extproc.envoy.finding import Finding, Level
from extproc.envoy.rules import RULES
from extproc.ground.yaml_file import read_yaml
from tests.envoy.watched_files import bootstrap

ENVOY = Path(__file__).parents[2] / "envoy"
GOOD = yaml.safe_load((ENVOY / "envoy.yaml").read_text(encoding="utf-8"))

DESTINATION = "x-gateway-destination-endpoint"
TELLS_MARK = "request.headers['x-extproc-unseen']"
FROM_METADATA = f"[{{metadata: {{key: envoy.lb, path: [{{key: {DESTINATION}}}]}}}}]"
OF_HEADERS_FIRST = {"forged_header_is_removed"}
OF_WHOLE_FILES = {"router_cluster_exists", "route_cluster_exists"}

Breakage = Callable[["Bootstrap"], object]


class Bootstrap:
    """The parts of envoy/envoy.yaml that tests break."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = copy.deepcopy(GOOD)
        resources = self.tree["static_resources"]
        self.listener = resources["listeners"][0]
        self.manager = self.listener["filter_chains"][0]["filters"][0]["typed_config"]
        self.filters = self.manager["http_filters"]
        early = self.manager["early_header_mutation_extensions"]
        self.forgotten = early[0]["typed_config"]["mutations"]
        del self.filters[:2]  # which choose one of the routes that are left out below
        self.ext_proc = self.filters[0]["typed_config"]
        self.mode = self.ext_proc["processing_mode"]
        self.host = self.manager["route_config"]["virtual_hosts"][0]
        self.routes = self.host["routes"]
        del self.routes[:-1]  # the others lead to the same
        self.route = self.routes[0]["route"]
        self.clusters = resources["clusters"]
        self.router, self.replicas = self.clusters
        policies = self.replicas["load_balancing_policy"]["policies"]
        self.override = policies[0]["typed_extension_config"]["typed_config"]

    def split(self, *clusters: dict[str, object]) -> Self:
        """Let the route lead to several clusters."""
        del self.route["cluster"]
        self.route["weighted_clusters"] = {"clusters": [{"weight": 1, **one} for one in clusters]}
        return self

    def add_cluster(self, name: str) -> Self:
        """One that does not obey the router."""
        self.clusters.append({"name": name})
        return self

    def original_dst(self, **config: object) -> None:
        del self.replicas["load_balancing_policy"], self.replicas["load_assignment"]
        self.replicas.update(
            type="ORIGINAL_DST", lb_policy="CLUSTER_PROVIDED", original_dst_lb_config=config
        )

    def untold(self) -> Self:
        """Let a route keep responses from the router."""
        mode = {**self.mode, "response_header_mode": "SKIP"}
        self.routes.insert(0, {**self.routes[0], **override(processing_mode=mode)})
        return self

    def unmarked(self) -> Self:
        """Let clients set the mark."""
        del self.manager["early_header_mutation_extensions"]
        return self

    def forgetting(self, header: str) -> dict[str, Any]:
        """A filter that removes a header."""
        forget: dict[str, Any] = copy.deepcopy(self.filters[2])
        forget["typed_config"]["mutations"]["request_mutations"] = [{"remove": header}]
        return forget

    def headers_first(self) -> Self:
        """Let the headers come first, and the cluster go by the header that the answer sets."""
        self.mode["request_header_mode"] = "SEND"
        self.override["override_host_sources"] = [{"header": DESTINATION}]
        ext_proc, _, forget, router = self.filters
        self.filters[:] = [forget, ext_proc, router]
        return self


FILTER_CONFIG = "type.googleapis.com/envoy.config.route.v3.FilterConfig"
PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"


def per_filter(kind: str = FILTER_CONFIG, **config: object) -> dict[str, object]:
    """What a route may say of the ext_proc filter."""
    named = {"envoy.filters.http.ext_proc": {"@type": kind, **config}}
    return {"typed_per_filter_config": named}


def override(**overrides: object) -> dict[str, object]:
    """How a route may change the ext_proc filter."""
    return per_filter(PER_ROUTE, overrides=overrides)


WHOLE_BODY = {"request_body_mode": "BUFFERED"}
BUFFER_PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.BufferPerRoute"
NO_BUFFER = {
    "typed_per_filter_config": {
        "envoy.filters.http.buffer": {"@type": BUFFER_PER_ROUTE, "disabled": True}
    }
}


def buffered() -> dict[str, object]:
    """A route that has requests held, whatever is said around it."""
    limit = {"@type": BUFFER_PER_ROUTE, "buffer": {"max_request_bytes": 2**26}}
    return {"typed_per_filter_config": {"envoy.filters.http.buffer": limit}}


ONE_ALONE = Config(serve=ServeSettings(second_choice=False))
"""Fits any way to follow the choice."""


def complaints(tree: object, config: Config = ONE_ALONE) -> list[Finding]:
    return [finding for finding in check_envoy(tree, config) if finding.level is not Level.OK]


def broken(breakage: Breakage) -> list[Finding]:
    bootstrap = Bootstrap()
    breakage(bootstrap)
    return complaints(bootstrap.tree)


@pytest.mark.parametrize("name", ["envoy.yaml", "ext_proc.yaml"])
def test_our_own_files_pass_every_rule(name: str) -> None:
    findings = check_envoy(read_yaml(ENVOY / name))
    unjudged = OF_HEADERS_FIRST | (OF_WHOLE_FILES if name == "ext_proc.yaml" else set())
    rules = {rule.name for rule in RULES} | {"waits_for_room"}
    assert {finding.rule for finding in findings} == rules - unjudged
    assert {finding.level for finding in findings} == {Level.OK}


@pytest.mark.parametrize("path", sorted(ENVOY.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_file_of_ours_is_refused(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "Router: EXTPROC_SERVE__SECOND_CHOICE=false" in path.read_text(encoding="utf-8"):
        monkeypatch.setenv("EXTPROC_SERVE__SECOND_CHOICE", "false")
    assert main(["check", "--envoy", str(path)]) == 0
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tree", "rule", "words"),
    [
        (bootstrap(GOOD, Path("/live")), "has_ext_proc", "the file that lds_config names"),
        (read_yaml(ENVOY / "envoy_gateway.yaml"), "is_envoy", "not judged here"),
    ],
)
def test_what_is_not_in_a_file_is_said_to_be_unchecked(tree: object, rule: str, words: str) -> None:
    (finding,) = check_envoy(tree)
    assert (finding.rule, finding.level) == (rule, Level.WARNING)
    assert words in finding.text


def test_an_endpoint_picker_is_right() -> None:
    assert not complaints(read_yaml(ENVOY / "endpoint_picker.yaml"))


def test_a_cluster_that_takes_no_list_is_to_be_named_one_replica() -> None:
    findings = complaints(read_yaml(ENVOY / "original_dst.yaml"), Config())
    assert findings[0].rule == "one_replica_is_named"
    assert findings[0].level is Level.ERROR
    assert "Set serve.second_choice: false" in findings[0].text


def test_a_cluster_without_members_is_right_but_for_the_lack_of_a_fallback() -> None:
    (finding,) = complaints(read_yaml(ENVOY / "original_dst.yaml"))
    assert finding.rule == "goes_on_without_router"


BREAKAGES: list[tuple[str, Level, str, Breakage]] = [
    ("requests_wait", Level.ERROR, "SEND", lambda b: b.filters.pop(1)),
    ("requests_wait", Level.ERROR, "envoy.filters.http.buffer",
     lambda b: b.filters.insert(0, b.filters.pop(1))),
    ("routes_wait", Level.ERROR, "buffer is disabled",
     lambda b: b.routes[0].update(NO_BUFFER)),
    ("routes_wait", Level.ERROR, "buffer is disabled", lambda b: b.host.update(NO_BUFFER)),
    ("routes_wait", Level.ERROR, "buffer is disabled",
     lambda b: b.split({"name": "replicas", **NO_BUFFER})),
    ("routes_wait", Level.ERROR, "buffer is disabled",
     lambda b: b.filters[1].update(disabled=True)),
    ("headers_are_told", Level.ERROR, "request.path",
     lambda b: b.ext_proc.pop("request_attributes")),
    ("headers_are_told", Level.ERROR, "lacks request.headers['content-encoding']:",
     lambda b: b.ext_proc.update(request_attributes=["request.path"])),
    ("metadata_is_followed", Level.ERROR, "SEND",
     lambda b: b.override.update(override_host_sources=[{"header": DESTINATION}])),
    ("large_bodies_are_buffered", Level.WARNING, "413",
     lambda b: b.filters[1]["typed_config"].update(max_request_bytes=2**20)),
    ("body_is_buffered", Level.ERROR, "NONE", lambda b: b.mode.pop("request_body_mode")),
    ("body_is_buffered", Level.ERROR, "STREAMED",
     lambda b: b.mode.update(request_body_mode="STREAMED")),
    ("response_headers_are_sent", Level.ERROR, "SKIP",
     lambda b: b.mode.update(response_header_mode="SKIP")),
    ("response_headers_are_sent", Level.ERROR, "Add request.headers['x-extproc-unseen']",
     lambda b: (b.untold(), b.ext_proc["request_attributes"].remove(
         "request.headers['x-extproc-unseen']"))),
    ("response_attributes_are_sent", Level.WARNING, "lacks upstream.address, response.code",
     lambda b: b.ext_proc.pop("response_attributes")),
    ("response_attributes_are_sent", Level.WARNING, "lacks response.code:",
     lambda b: b.ext_proc["response_attributes"].remove("response.code")),
    ("allows_sampling", Level.WARNING, "allow_mode_override: true",
     lambda b: b.ext_proc.pop("allow_mode_override")),
    ("fails_open", Level.ERROR, "failure_mode_allow: true",
     lambda b: b.ext_proc.update(failure_mode_allow=False)),
    ("waits_briefly", Level.WARNING, "30 s", lambda b: b.ext_proc.update(message_timeout="30s")),
    ("forged_header_is_removed", Level.ERROR, "header_mutation",
     lambda b: b.headers_first().filters.pop(0)),
    ("forged_header_is_removed", Level.ERROR, "before",
     lambda b: b.headers_first().filters.insert(1, b.filters.pop(0))),
    ("forged_mark_is_removed", Level.WARNING, "early_header_mutation", Bootstrap.unmarked),
    ("replicas_obey", Level.ERROR, f"sources: {FROM_METADATA}",
     lambda b: b.replicas.pop("load_balancing_policy")),
    ("replicas_obey", Level.ERROR, f"sources: [{{header: {DESTINATION}}}]",
     lambda b: (b.headers_first(), b.replicas.pop("load_balancing_policy"))),
    ("replicas_obey", Level.ERROR, "ignores",
     lambda b: (b.replicas.pop("load_balancing_policy"), b.replicas.update(type="ORIGINAL_DST"))),
    ("no_header_chooses_any_address", Level.ERROR, "use_http_header",
     lambda b: b.headers_first().original_dst(use_http_header=True, http_header_name=DESTINATION)),
    ("goes_on_without_router", Level.WARNING, "503 while the router is down, and always to",
     lambda b: b.original_dst(metadata_key={"key": "envoy.lb", "path": [{"key": DESTINATION}]})),
    ("source_is_known", Level.ERROR, f"sources: {FROM_METADATA}",
     lambda b: b.override.update(override_host_sources=[{"header": "x-other"}])),
    ("metadata_is_received", Level.ERROR, "envoy.lb",
     lambda b: b.ext_proc.pop("metadata_options")),
    ("has_fallback", Level.ERROR, "least_request", lambda b: b.override.pop("fallback_policy")),
    ("members_are_addresses", Level.ERROR, "LOGICAL_DNS",
     lambda b: b.replicas.update(type="LOGICAL_DNS")),
    ("router_speaks_http2", Level.ERROR, "HTTP/2",
     lambda b: b.router.pop("typed_extension_protocol_options")),
    ("limits_are_raised", Level.WARNING, "'router'", lambda b: b.router.pop("circuit_breakers")),
    ("limits_are_raised", Level.WARNING, "max_requests (1024)",
     lambda b: b.replicas["circuit_breakers"]["thresholds"][0].update(max_requests=1024)),
    ("large_bodies_pass", Level.WARNING, "413",
     lambda b: b.listener.pop("per_connection_buffer_limit_bytes")),
    ("answers_may_be_long", Level.ERROR, "15 s", lambda b: b.route.pop("timeout")),
    ("answers_may_be_long", Level.ERROR, "60 s", lambda b: b.route.update(timeout="60s")),
    ("answers_may_be_silent", Level.WARNING, "5 min",
     lambda b: b.manager.pop("stream_idle_timeout")),
    ("second_choice_is_used", Level.WARNING, "retry_policy", lambda b: b.route.pop("retry_policy")),
    ("router_cluster_exists", Level.ERROR, "'ruoter'",
     lambda b: b.ext_proc["grpc_service"]["envoy_grpc"].update(cluster_name="ruoter")),
    ("router_cluster_exists", Level.ERROR, "names no cluster",
     lambda b: b.ext_proc.pop("grpc_service")),
    ("route_cluster_exists", Level.ERROR, "'replcas'", lambda b: b.route.update(cluster="replcas")),
    ("route_cluster_exists", Level.ERROR, "'other'",
     lambda b: b.route.update(weighted_clusters={"clusters": [
         {"name": b.route.pop("cluster"), "weight": 1}, {"name": "other", "weight": 1}]})),
    ("filter_is_enabled", Level.ERROR, "disabled", lambda b: b.filters[0].update(disabled=True)),
    ("filter_is_enabled", Level.ERROR, "no route enables it",
     lambda b: (b.filters[0].update(disabled=True), b.routes[0].update(per_filter(disabled=True)))),
    ("router_is_health_checked", Level.WARNING, "hangs", lambda b: b.router.pop("health_checks")),
    ("trailers_are_sent", Level.ERROR, "request_trailer_mode: SEND",
     lambda b: b.mode.update(request_body_mode="FULL_DUPLEX_STREAMED")),
    ("trailers_are_sent", Level.ERROR, "response_trailer_mode: SEND",
     lambda b: b.mode.update(response_body_mode="FULL_DUPLEX_STREAMED",
                             response_trailer_mode="SKIP")),
    ("the_end_is_heard", Level.ERROR, "response_trailer_mode: SEND",
     lambda b: b.mode.update(request_body_mode="FULL_DUPLEX_STREAMED", request_trailer_mode="SEND",
                             response_trailer_mode="SKIP")),
    ("vanished_replicas_are_hung_up_on", Level.WARNING, "has no tcp_keepalive",
     lambda b: b.replicas.pop("upstream_connection_options")),
    ("limits_are_raised", Level.WARNING, "max_retries (3)",
     lambda b: b.replicas["circuit_breakers"]["thresholds"][0].pop("max_retries")),
    ("routes_ask", Level.ERROR, "Remove disabled: true",
     lambda b: b.routes[0].update(per_filter(PER_ROUTE, disabled=True))),
    ("routes_ask", Level.ERROR, "virtual host",
     lambda b: b.host.update(per_filter(PER_ROUTE, disabled=True))),
    ("routes_ask", Level.ERROR, "disabled", lambda b: b.host.update(per_filter(disabled=True))),
    ("routes_ask", Level.ERROR, "disabled",
     lambda b: b.host.update(per_filter(config={"@type": PER_ROUTE, "disabled": True}))),
    ("routes_ask", Level.ERROR, "weighted clusters",
     lambda b: b.split({"name": "replicas", **per_filter(PER_ROUTE, disabled=True)})),
    ("routes_ask", Level.ERROR, "disabled",
     lambda b: (b.filters[0].update(disabled=True),
                b.routes.append({"match": {"prefix": "/x"}, "redirect": {}, **override()}))),
    ("body_is_buffered", Level.ERROR, "NONE",
     lambda b: b.routes[0].update(override(processing_mode={"request_body_mode": "NONE"}))),
    ("body_is_buffered", Level.ERROR, "NONE",
     lambda b: b.host.update(override(processing_mode={"response_body_mode": "STREAMED"}))),
    ("fails_open", Level.ERROR, "fails",
     lambda b: b.routes[0].update(override(failure_mode_allow=False))),
    ("filter_is_reached", Level.ERROR, "last",
     lambda b: b.headers_first().filters.insert(1, b.filters.pop())),
    ("filter_is_reached", Level.ERROR, "refuses",
     lambda b: b.filters.insert(0, b.filters.pop())),
    ("second_choice_is_used", Level.WARNING, "num_retries: 1",
     lambda b: b.route["retry_policy"].update(num_retries=0)),
    ("failures_are_retried", Level.WARNING, "[500, 502, 503]",
     lambda b: b.route["retry_policy"].update(retry_on="connect-failure,reset")),
    ("failures_are_retried", Level.WARNING, "no retry on status 500",
     lambda b: b.route["retry_policy"].update(retriable_status_codes=[503])),
    ("first_tokens_may_wait", Level.ERROR, "stream_idle_timeout is 1 s",
     lambda b: b.manager.update(stream_idle_timeout="1s")),
    ("first_tokens_may_wait", Level.ERROR, "idle_timeout is 0.5 s",
     lambda b: b.route.update(idle_timeout="0.5s")),
    ("routes_lead_to_replicas", Level.ERROR, "'other', which ignores",
     lambda b: (b.add_cluster("other"), b.route.update(cluster="other"))),
    ("routes_lead_to_replicas", Level.ERROR, "Write cluster: 'replicas'",
     lambda b: (b.add_cluster("other"), b.split({"name": "replicas"}, {"name": "other"}))),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "level", "words", "breakage"), BREAKAGES)
def test_one_thing_broken_is_the_one_thing_found(
    rule: str, level: Level, words: str, breakage: Breakage
) -> None:
    (finding,) = broken(breakage)
    assert (finding.rule, finding.level) == (rule, level)
    assert words in finding.text
    assert finding.where


def test_every_rule_has_been_seen_to_fail() -> None:
    assert {rule.name for rule in RULES} == {rule for rule, *_ in BREAKAGES} | {"is_complete"}


ALLOWED: list[Breakage] = [
    lambda b: b.mode.update(request_body_mode="FULL_DUPLEX_STREAMED", request_trailer_mode="SEND"),
    lambda b: b.ext_proc.update(grpc_service={"google_grpc": {"target_uri": "router:50051"}}),
    lambda b: b.tree.update(dynamic_resources={"cds_config": {"ads": {}}}) or b.clusters.pop(0),
    lambda b: (b.route.pop("cluster"), b.route.update(cluster_header="x-cluster")),
    lambda b: (
        b.filters[0].update(disabled=True),
        b.routes[0].update(per_filter(config={})),
    ),
    lambda b: b.replicas["circuit_breakers"]["thresholds"][0].update(
        max_retries=None, retry_budget={"budget_percent": {"value": 50}}
    ),
    lambda b: b.ext_proc.pop("message_timeout"),
    lambda b: b.headers_first(),
    lambda b: b.untold(),
    lambda b: b.route.update(timeout="3600s"),
    lambda b: (b.manager.pop("stream_idle_timeout"), b.route.update(idle_timeout="0s")),
    lambda b: b.replicas.update(type="EDS", eds_cluster_config={"eds_config": {"ads": {}}}),
    lambda b: b.add_cluster("elsewhere"),
    lambda b: (
        b.add_cluster("web"),
        b.routes.append({"match": {"prefix": "/web"}, "route": {"cluster": "web"}}),
    ),
    lambda b: b.split({"name": "replicas"}),
    lambda b: (b.manager.update(stream_idle_timeout="0s"), b.route.update(idle_timeout="120s")),
    lambda b: (b.manager.update(stream_idle_timeout="1s"), b.route.update(idle_timeout="0s")),
    lambda b: b.route["retry_policy"].pop("num_retries"),
    lambda b: b.route["retry_policy"].update(retry_on="connect-failure,5xx"),
    lambda b: b.routes[0].update(override(processing_mode=WHOLE_BODY)),
    lambda b: b.routes[0].update(override(failure_mode_allow=True)),
    lambda b: (b.host.update(NO_BUFFER), b.routes[0].update(buffered())),
    lambda b: (b.filters[1].update(disabled=True), b.routes[0].update(buffered())),
    lambda b: (
        b.host.update(NO_BUFFER),
        b.routes[0].update(override(processing_mode={**b.mode, "request_header_mode": "SEND"})),
    ),
    lambda b: (
        b.host.update(per_filter(PER_ROUTE, disabled=True)),
        b.routes[0].update(override(processing_mode=WHOLE_BODY)),
    ),
    lambda b: (
        b.add_cluster("web"),
        b.routes.append(
            {
                "match": {"prefix": "/web"},
                "route": {"cluster": "web"},
                **override(processing_mode={}),
            }
        ),
        b.routes.append(
            {
                "match": {"prefix": "/img"},
                "route": {"cluster": "web"},
                **per_filter(PER_ROUTE, disabled=True),
            }
        ),
    ),
    lambda b: (
        b.headers_first().filters.pop(0),
        b.forgotten.append({"remove": "X-Gateway-Destination-Endpoint"}),
    ),
    lambda b: (b.unmarked(), b.ext_proc["request_attributes"].remove(TELLS_MARK)),
    lambda b: (b.unmarked(), b.filters.insert(0, b.forgetting("x-extproc-unseen"))),
]


@pytest.mark.parametrize("change", ALLOWED)
def test_other_ways_to_have_it_right_are_right(change: Breakage) -> None:
    assert broken(change) == []


def test_a_file_without_the_filter_says_so_and_no_more() -> None:
    (finding,) = broken(lambda b: b.filters.pop(0))
    assert (finding.rule, finding.level) == ("has_ext_proc", Level.ERROR)


def test_names_in_answers_need_every_answer() -> None:
    named = Config.model_validate({"route": {"answer_asked_name": True}})
    file = Bootstrap().untold()
    (finding,) = [one for one in check_envoy(file.tree, named) if one.level is not Level.OK]
    assert (finding.rule, finding.level) == ("every_answer_is_shown", Level.ERROR)
    assert "local_ratelimit" in finding.text
    assert "this route, which matches their mark x-extproc-unseen" in finding.text
    del file.routes[0]
    assert {one.level for one in check_envoy(file.tree, named)} == {Level.OK}


def test_headers_that_settings_name_must_be_told() -> None:
    named = Config.model_validate(
        {
            "route": {"allow_policy_header": True, "session_cookie": "sid"},
            "request": {"tenant_header": "X-Tenant"},
        }
    )
    file = Bootstrap()
    (finding,) = [one for one in check_envoy(file.tree, named) if one.level is not Level.OK]
    assert (finding.rule, finding.level) == ("named_headers_are_told", Level.ERROR)
    lacking = ["request.headers['cookie']", "request.headers['x-tenant']"]
    assert finding.text.endswith("Add " + ", ".join(lacking))  # the policy's is there
    file.ext_proc["request_attributes"] += lacking
    assert {one.level for one in check_envoy(file.tree, named)} == {Level.OK}
    file.headers_first()
    assert {one.level for one in check_envoy(file.tree, named)} == {Level.OK}


def test_a_clients_priority_must_not_reach_replicas_where_objectives_have_one() -> None:
    urgent = Config.model_validate(
        {"hold": {"objectives": {"urgent": {"priority": 1, "tenants": ["a"]}}}}
    )
    file = Bootstrap()
    file.forgotten.remove({"remove": "x-vllm-priority"})
    assert complaints(file.tree) == []
    (finding,) = [one for one in check_envoy(file.tree, urgent) if one.level is not Level.OK]
    assert (finding.rule, finding.level) == ("forged_priority_is_removed", Level.WARNING)
    file.headers_first()
    assert {one.level for one in check_envoy(file.tree, urgent)} == {Level.OK}


def test_headers_that_settings_name_must_arrive() -> None:
    named = Config.model_validate(
        {"route": {"session_header": "x-session"}, "request": {"tenant_header": "x_tenant"}}
    )
    file = Bootstrap()
    file.ext_proc["request_attributes"] += [
        "request.headers['x-session']",
        "request.headers['x_tenant']",
    ]
    options = file.manager["common_http_protocol_options"]
    for action in ("DROP_HEADER", "REJECT_REQUEST"):
        options["headers_with_underscores_action"] = action
        (finding,) = [one for one in check_envoy(file.tree, named) if one.level is not Level.OK]
        assert (finding.rule, finding.level) == ("named_headers_arrive", Level.ERROR)
        assert f"is {action}, and the router's settings name x_tenant: " in finding.text
    options["headers_with_underscores_action"] = "ALLOW"
    assert {one.level for one in check_envoy(file.tree, named)} == {Level.OK}
    del file.manager["common_http_protocol_options"]
    assert {one.level for one in check_envoy(file.tree, named)} == {Level.OK}


def test_what_is_told_of_decisions_must_be_taken() -> None:
    telling = Config.model_validate({"serve": {"decision_metadata": True}})
    file = Bootstrap()
    (finding,) = [one for one in check_envoy(file.tree, telling) if one.level is not Level.OK]
    assert (finding.rule, finding.level) == ("decision_metadata_is_taken", Level.WARNING)
    file.ext_proc["metadata_options"]["receiving_namespaces"]["untyped"].append("extproc")
    assert {one.level for one in check_envoy(file.tree, telling)} == {Level.OK}


def test_envoy_must_wait_as_long_as_requests_wait_at_the_router() -> None:
    file = Bootstrap()
    file.ext_proc["max_message_timeout"] = "60s"
    (finding,) = complaints(file.tree)
    assert (finding.rule, finding.level) == ("waits_for_room", Level.WARNING)
    assert "is 60 s" in finding.text
    assert "Write max_message_timeout: 300s" in finding.text
    for longest_s in (60, 0):
        config = Config.model_validate({"hold": {"longest_s": longest_s}})
        assert {one.level for one in check_envoy(file.tree, config)} == {Level.OK}
    del file.ext_proc["max_message_timeout"]
    (finding,) = complaints(file.tree)
    assert "is 0 s" in finding.text


@pytest.mark.parametrize("tree", [None, [], {}, [1, 2], {"a": 1}, "text", [{"name": "x"}]])
def test_what_is_no_envoy_file_is_said_to_be_none(tree: object) -> None:
    (finding,) = check_envoy(tree)
    assert (finding.rule, finding.level) == ("is_envoy", Level.ERROR)
    assert "no Envoy file" in finding.text


def test_parts_that_are_elsewhere_are_said_to_be_unchecked() -> None:
    (finding,) = complaints({"http_filters": Bootstrap().filters})
    assert (finding.rule, finding.level) == ("is_complete", Level.WARNING)
    assert "no listener and no route and no cluster" in finding.text


MISSPELT: list[tuple[str, str, Breakage]] = [
    ("processing_mode.request_bdy_mode", "did you mean 'request_body_mode'?",
     lambda b: b.mode.update(request_bdy_mode="BUFFERED")),
    ("processing_mode.request_body_mode", "BUFERED",
     lambda b: b.mode.update(request_body_mode="BUFERED")),
    ("static_resources.clusters[0].connect_timeout", "soon",
     lambda b: b.router.update(connect_timeout="soon")),
    ("clusters[1].circuit_breakers.thresholds[0].max_request", "did you mean 'max_requests'?",
     lambda b: b.replicas["circuit_breakers"]["thresholds"][0].update(max_request=1)),
    ("static_resources.clusters[1].circuit_breakers", "must hold the fields",
     lambda b: b.replicas.update(circuit_breakers=3)),
    ("static_resources.clusters[1].health_checks", "must hold a list",
     lambda b: b.replicas.update(health_checks={"timeout": "1s"})),
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
def test_what_does_not_meet_envoys_schema_is_named(
    place: str, words: str, breakage: Breakage
) -> None:
    (finding,) = broken(breakage)
    assert (finding.rule, finding.level) == ("schema", Level.ERROR)
    assert place in finding.where
    assert words in finding.text


def test_a_type_of_another_build_is_a_warning() -> None:
    filter = {"name": "x", "typed_config": {"@type": "type.googleapis.com/acme.v1.Filter", "a": 1}}
    (finding,) = broken(lambda b: b.filters.insert(0, filter))
    assert (finding.rule, finding.level) == ("schema", Level.WARNING)
    assert "acme.v1.Filter" in finding.text


def test_a_typed_struct_is_looked_into() -> None:
    def break_it(bootstrap: Bootstrap) -> None:
        fields = dict(bootstrap.ext_proc)
        del fields["failure_mode_allow"]
        struct = {"type_url": fields.pop("@type"), "value": fields}
        bootstrap.filters[0]["typed_config"] = {
            "@type": "type.googleapis.com/xds.type.v3.TypedStruct",
            **struct,
        }

    finding, *_ = broken(break_it)
    assert (finding.rule, finding.level) == ("fails_open", Level.ERROR)


def test_patches_of_an_istio_envoy_filter_are_looked_into() -> None:
    good = Bootstrap()
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


def test_the_patches_for_istio_lack_only_the_route() -> None:
    findings = check_envoy(read_yaml(ENVOY / "istio.yaml"))
    (finding,) = [one for one in findings if one.level is not Level.OK]
    assert finding.rule == "is_complete"
    assert "no route" in finding.text


def test_rules_see_every_field() -> None:
    """Also those that the package's own reader of JSON passes over."""
    router = Bootstrap().router | {"outlier_detection": {"consecutive_5xx": 7}}
    (part,) = EnvoyFile({"clusters": [router]}).all(Cluster)
    assert part.message.outlier_detection is not None
    assert part.message.outlier_detection.consecutive_5xx == 7


def test_json_in_camel_case_is_read_too() -> None:
    (finding,) = complaints(_camel(Bootstrap().tree | {"staticResourcez": {}}))
    assert "did you mean 'static_resources'?" in finding.text
    assert complaints(_camel(Bootstrap().tree)) == []


def _camel(value: Any) -> Any:
    if isinstance(value, list):
        return [_camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key if "." in key or "@" in key else _camel_case(key): _camel(item)
        for key, item in value.items()
    }


def _camel_case(key: str) -> str:
    first, *others = key.split("_")
    return first + "".join(word.capitalize() for word in others)


def routers(*addresses: tuple[str, int]) -> Bootstrap:
    """A good file that lists these routers."""
    bootstrap = Bootstrap()
    bootstrap.router["load_assignment"]["endpoints"] = [
        {
            "lb_endpoints": [
                {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}
            ]
        }
        for host, port in addresses
    ]
    return bootstrap


def test_workers_that_envoy_does_not_know_are_named() -> None:
    two_hosts = routers(("a", 1), ("b", 1), ("a", 2))
    (finding,) = (
        one
        for one in check_envoy(two_hosts.tree, Config(serve=ServeSettings(workers=2)))
        if one.level is not Level.OK
    )
    assert finding.level is Level.WARNING
    assert "'router' lists 1 of 2 workers" in finding.text
    assert "the ports 1 to 2" in finding.text
    assert finding.where.startswith("static_resources.clusters")


@pytest.mark.parametrize(
    ("bootstrap", "workers", "judged"),
    [
        (routers(("a", 1)), 1, False),
        (routers(("a", 1), ("a", 2), ("b", 1), ("b", 2)), 2, True),
        (routers(), 2, False),  # members come from elsewhere
    ],
)
def test_workers_that_envoy_knows_are_fine(
    bootstrap: Bootstrap, workers: int, judged: bool
) -> None:
    findings = check_envoy(bootstrap.tree, Config(serve=ServeSettings(workers=workers)))
    assert {finding.level for finding in findings} == {Level.OK}
    assert any(finding.rule == "workers_are_listed" for finding in findings) is judged


@pytest.mark.parametrize("envoys", [False, True])
@pytest.mark.parametrize("routers", [False, True])
def test_tls_of_one_side_alone_is_told(envoys: bool, routers: bool) -> None:
    bootstrap = Bootstrap()
    if envoys:
        kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        bootstrap.router["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": kind, "sni": "router"},
        }
    files = {"tls_cert": Path("tls.crt"), "tls_key": Path("tls.key")} if routers else {}
    findings = check_envoy(bootstrap.tree, Config(serve=ServeSettings(**files)))
    told = [(one.level, one.text) for one in findings if one.rule == "transport_fits"]
    if envoys != routers:
        ((level, text),) = told
        assert level is Level.WARNING
        assert ("'router' speaks plain text, and the router TLS" in text) is routers
    else:
        assert [level for level, _ in told] == [Level.OK] * routers


def test_tls_within_another_transport_is_tls() -> None:
    kind = "type.googleapis.com/envoy.extensions.transport_sockets"
    tls = {"@type": f"{kind}.tls.v3.UpstreamTlsContext", "sni": "router"}
    wrapped = {
        "@type": f"{kind}.proxy_protocol.v3.ProxyProtocolUpstreamTransport",
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
    }
    bootstrap = Bootstrap()
    bootstrap.router["transport_socket"] = {
        "name": "envoy.transport_sockets.upstream_proxy_protocol",
        "typed_config": wrapped,
    }
    serve = ServeSettings(tls_cert=Path("tls.crt"), tls_key=Path("tls.key"))
    findings = check_envoy(bootstrap.tree, Config(serve=serve))
    assert [one.level for one in findings if one.rule == "transport_fits"] == [Level.OK]


def test_the_command_knows_how_many_workers_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    envoy = str(ENVOY / "envoy.yaml")
    assert main(["check", "--serve.workers", "4", "--envoy", envoy]) == 0
    told = capsys.readouterr().out
    assert "3 more on the next ports" in told
    assert "lists 1 of 4 workers" in told


def test_the_command_prints_what_it_understood_and_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--replicas", "a:1", "--envoy", str(ENVOY / "envoy.yaml")]) == 0
    good = capsys.readouterr().out
    assert "replicas a:1 (llama-3-8b-a100)" in good
    assert "error" not in good

    bad = Bootstrap()
    bad.filters.pop(1)
    bad.ext_proc.pop("allow_mode_override")
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(bad.tree), encoding="utf-8")
    assert main(["check", "--envoy", str(path)]) == 1
    name, *lines = capsys.readouterr().out.splitlines()
    assert name == str(path)  # no configuration was given: nothing is said of it
    assert [line.split()[0] for line in lines[:3]] == ["error", "warning", "ok"]


def test_a_configuration_is_told_where_one_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*args: str) -> bool:
        assert main(["check", *args]) == 0
        return "policy   " in capsys.readouterr().out

    envoy = ("--envoy", str(ENVOY / "envoy.yaml"))
    config = tmp_path / "config.yaml"
    config.write_text("pool: llama\n", encoding="utf-8")
    assert told()
    assert told(*envoy, "--config", str(config))
    assert told(*envoy, "--poll.interval_s", "0.5")
    assert not told(*envoy)
    monkeypatch.setenv("EXTPROC_POOL", "llama")
    assert told(*envoy)


def test_names_of_models_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--route.models", "{l: [a, b], c: {l: 3, n: 1}}"]) == 0
    told = capsys.readouterr().out
    assert "models   l: served as a or b; c: 75.0% l, 25.0% n" in told


@pytest.mark.parametrize("text", ["a: [", "\0", "a: 2024-13-45", "[" * 3000, "&a [*a]", "\xff"])
def test_a_file_that_is_no_yaml_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode("latin-1"))
    assert main(["check", "--envoy", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"extproc check: {path}: not YAML: ")


def test_a_wrong_configuration_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--poll.interval_s", "-1"]) == 2
    assert capsys.readouterr().err.startswith("extproc check: --poll.interval_s: ")


def test_a_tokenizer_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--request.tokenizers", "{llama: /no/such/tokenizer.json}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("extproc check: request.tokenizers: ")
    assert "/no/such/tokenizer.json" in line


def test_the_password_of_redis_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--redis.url", "redis://user:hunter2@redis.example:6380/1"]) == 0
    output = capsys.readouterr().out
    assert "shared in redis.example:6380" in output
    assert "hunter2" not in output
