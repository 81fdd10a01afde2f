"""Alert rules and Grafana dashboard use existing metrics, compose.yaml can run them, and promtool
sees each alert fire on its cause only."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.observe.test_reference import DOCS, RULES, rules, series

FOLDER = DOCS / "observability"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
COMPOSE = yaml.safe_load((DOCS.parent / "compose.yaml").read_text(encoding="utf-8"))["services"]
BY_PROMETHEUS = {"instance", "job", "le"}
OF_PROMETHEUS: dict[str, tuple[bool, set[str]]] = {"up": (False, set())}
OF_COUNTERS = {"rate of a range", "increase of a range"}
OF_ENVOY: dict[str, tuple[bool, set[str]]] = {
    "envoy_http_ext_proc_failure_mode_allowed": (True, set()),
    "envoy_http_ext_proc_streams_started": (True, set()),
}
"""Counters of Envoy, which tests/e2e/test_failures.py reads from a real one."""


def provisioned(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text(encoding="utf-8"))


def targets() -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']}, {target['refId']}", target


def expressions() -> dict[str, str]:
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    found |= {name: target["expr"] for name, target in targets()}
    return {name: text.replace("$__rate_interval", "5m") for name, text in found.items()}


def selectors(
    node: Any, inside: str = "", grouped: frozenset[str] = frozenset()
) -> Iterator[tuple[str, frozenset[str], str]]:
    match node:
        case promql.VectorSelector():
            matched = {matcher.name for matcher in node.matchers.matchers}
            yield node.name or "", grouped | matched, inside
        case promql.MatrixSelector():
            yield from selectors(node.vector_selector, f"{inside} of a range", grouped)
        case promql.Call():
            for argument in node.args:
                yield from selectors(argument, node.func.name, grouped)
        case promql.BinaryExpr():
            for side in (node.lhs, node.rhs):
                yield from selectors(side, grouped=grouped)
        case promql.AggregateExpr():
            labels = node.modifier.labels if node.modifier else ()
            yield from selectors(node.expr, grouped=grouped.union(labels))
        case promql.ParenExpr():
            yield from selectors(node.expr, grouped=grouped)
        case _:
            assert isinstance(node, promql.NumberLiteral), type(node)


@pytest.mark.parametrize(("name", "text"), expressions().items(), ids=expressions())
def test_expression_uses_existing_metrics_and_labels(name: str, text: str) -> None:
    used = list(selectors(promql.parse(text)))
    assert used
    for metric, named, function in used:
        is_counter, labels = (series() | OF_ENVOY | OF_PROMETHEUS)[metric]
        assert (function in OF_COUNTERS) == is_counter, metric
        assert named <= labels | BY_PROMETHEUS


def test_legends_name_labels_of_the_expression() -> None:
    for _, target in targets():
        for word in target["legendFormat"].split("{{")[1:]:
            assert word.partition("}}")[0] in target["expr"], target


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_compose_mounts_existing_files_and_listens_on_loopback(name: str) -> None:
    service = COMPOSE[name]
    assert service["profiles"] == ["observe"]
    assert service["image"].rpartition(":")[2] not in ("", "latest")
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    for volume in service["volumes"]:
        here, _, mode = volume.split(":")
        assert (DOCS.parent / here).exists()
        assert mode == "ro"


def test_prometheus_scrapes_all_parts() -> None:
    config = provisioned("prometheus.yml")
    jobs = [static for job in config["scrape_configs"] for static in job["static_configs"]]
    addresses = [target for static in jobs for target in static["targets"]]
    admins = {
        "router": COMPOSE["router"]["environment"]["EXTPROC_SERVE__ADMIN"],
        "poller": COMPOSE["poller"]["environment"]["EXTPROC_POLL__ADMIN"],
        "envoy": COMPOSE["envoy"]["ports"][1],
    }
    ports = {service: admin.rpartition(":")[2] for service, admin in admins.items()}
    assert sorted(addresses) == sorted(f"{service}:{port}" for service, port in ports.items())
    assert set(config["rule_files"]) < mounted("prometheus")


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = provisioned("provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = provisioned("provisioning/dashboards/extproc.yaml")["providers"]
    home = COMPOSE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert home in mounted("grafana")


def mounted(service: str) -> set[str]:
    return {volume.split(":")[1] for volume in COMPOSE[service]["volumes"]}


# -- firing alerts ----------------------------------------------------------------------------

PROMTOOL = shutil.which("promtool")
AT = "70m"
"""Time at which alerts are looked at: the slowest takes an hour."""


def speed(instance: str, replica: str, phase: str = "decode") -> str:
    labels = f"instance='{instance}',replica='{replica}',profile='p',phase='{phase}'"
    return f"extproc_replica_speed_ratio{{{labels}}}"


FIRES: dict[str, dict[str, str]] = {
    "ExtprocProcessDown": {
        "up{instance='a',job='router'}": "1x60 0x10",
        "extproc_build_info{instance='a',job='router'}": "1x60 _x10",
        "up{instance='b',job='node'}": "0x70",
    },
    "ExtprocNoReplica": {
        "extproc_refused_total{instance='a',reason='service_unavailable_error'}": "0+10x70",
        "extproc_refused_total{instance='a',reason='model_not_found'}": "0+10x70",
    },
    "ExtprocPollerWithoutRedis": {"extproc_poll_redis_lost{instance='a',pool='p'}": "1x70"},
    "ExtprocRouterSlow": {"extproc_loop_delay_seconds{instance='a'}": "0.1x70"},
    "ExtprocLookupFails": {"extproc_poll_lookups_failing{instance='a',pool='p'}": "1x70"},
    "ExtprocStateStale": {"extproc_state_age_seconds{instance='a'}": "0+60x70"},
    "ExtprocFailOpen": {
        "envoy_http_ext_proc_failure_mode_allowed{instance='e'}": "0+10x70",
        "envoy_http_ext_proc_streams_started{instance='e'}": "0+100x70",
    },
    "ExtprocRouterIdle": {
        "extproc_other_routers{instance='a',job='router'}": "1x70",
        "extproc_other_routers{instance='b',job='router'}": "1x70",
        "extproc_requests_total{instance='a',job='router',result='routed'}": "0+100x70",
    },
    "ExtprocExternalLoad": {
        "extproc_external_requests{instance='a',pool='p'}": "2x70",
        "extproc_external_requests{instance='b',pool='p'}": "2x70",
    },
    "ExtprocNotFollowed": {
        "extproc_not_followed_total{instance='a',reason='fallback'}": "0+10x70",
        "extproc_responses_total{instance='a',status='2xx'}": "0+100x70",
    },
    "ExtprocReplicaExcluded": {"extproc_replica_excluded{replica='a',reason='failing'}": "1x70"},
    "ExtprocReplicaSlow": {
        speed("a", "r1"): "0.6x70",
        speed("a", "r2"): "1x70",
        speed("a", "r3"): "1x70",
        speed("a", "r3", "prefill"): "0.1x70",
        speed("b", "r1"): "0.6x70",
    },
    "ExtprocReplicaFails": {
        "extproc_failures_total{replica='a'}": "0+10x70",
        "extproc_decisions_total{replica='a',policy='completion'}": "0+100x70",
    },
    "ExtprocTooFewReplicas": {
        "extproc_replicas_needed{pool='p',instance='a'}": "2x70",
        "extproc_replicas_needed{pool='p',instance='b'}": "2x70",
        "extproc_poll_replicas_healthy{pool='p',instance='c'}": "3x70",
    },
    "ExtprocNoRouter": {"up{instance='a',job='router'}": "0x70"},
    "ExtprocUnrouted": {
        "extproc_requests_total{instance='a',result='unrouted'}": "0+10x70",
        "extproc_requests_total{instance='b',result='routed'}": "0+10x70",
    },
    "ExtprocTooManyStreams": {
        "extproc_requests_total{instance='a',result='overload'}": "0+10x70",
        "extproc_requests_total{instance='b',result='routed'}": "0+10x70",
    },
    "ExtprocUnanswered": {
        "extproc_requests_total{instance='a',result='unanswered'}": "0+10x70",
        "extproc_requests_total{instance='a',result='routed'}": "0+100x70",
        "extproc_requests_total{instance='b',result='unanswered'}": "0+1x70",
        "extproc_requests_total{instance='b',result='routed'}": "0+100x70",
    },
    "ExtprocSlowDecisions": {
        "extproc_decision_seconds_bucket{instance='a',le='0.05'}": "0+90x70",
        "extproc_decision_seconds_bucket{instance='a',le='0.2'}": "0+100x70",
        "extproc_decision_seconds_bucket{instance='a',le='+Inf'}": "0+100x70",
        "extproc_decision_seconds_bucket{instance='b',le='0.05'}": "0+100x70",
        "extproc_decision_seconds_bucket{instance='b',le='+Inf'}": "0+100x70",
    },
    "ExtprocGaugesFrozen": {
        "extproc_replica_gauges_ignored{instance='a',replica='r1'}": "1x70",
        "extproc_replica_gauges_ignored{instance='b',replica='r1'}": "1x70",
    },
    "ExtprocRequestsQueued": {
        "extproc_requests_queued{objective='batch',tenant='t1'}": "2x70",
        "extproc_requests_queued{objective='batch',tenant='t2'}": "1x70",
        "extproc_requests_queued{objective='',tenant=''}": "0x70",
    },
    "ExtprocRefused": {
        "extproc_refused_total{reason='saturated'}": "0+10x70",
        "extproc_refused_total{reason='model_not_found'}": "0+10x70",
    },
    "ExtprocPredictionsOff": {
        "extproc_completion_predicted_ratio_bucket{model='off',le='2'}": "0x70",
        "extproc_completion_predicted_ratio_bucket{model='off',le='4'}": "0+10x70",
        "extproc_completion_predicted_ratio_bucket{model='off',le='+Inf'}": "0+10x70",
        "extproc_completion_predicted_ratio_count{model='off'}": "0+10x70",
        "extproc_completion_predicted_ratio_bucket{model='good',le='0.8'}": "0x70",
        "extproc_completion_predicted_ratio_bucket{model='good',le='1.2'}": "0+10x70",
        "extproc_completion_predicted_ratio_bucket{model='good',le='+Inf'}": "0+10x70",
        "extproc_completion_predicted_ratio_count{model='good'}": "0+10x70",
    },
    "ExtprocPrefixCacheCold": {
        "extproc_prefix_cache_expected_tokens_total{replica='cold'}": "0+9000x70",
        "extproc_prefix_cache_reported_tokens_total{replica='cold'}": "0+900x70",
        "extproc_prefix_cache_expected_tokens_total{replica='warm'}": "0+9000x70",
        "extproc_prefix_cache_reported_tokens_total{replica='warm'}": "0+8000x70",
    },
    "ExtprocRedisSlow": {
        "extproc_redis_seconds_bucket{instance='a',le='0.02'}": "0+10x70",
        "extproc_redis_seconds_bucket{instance='a',le='0.1'}": "0+100x70",
        "extproc_redis_seconds_bucket{instance='a',le='+Inf'}": "0+100x70",
        "extproc_loop_delay_seconds{instance='a'}": "0.001x70",
        "extproc_redis_seconds_bucket{instance='busy',le='0.02'}": "0+10x70",
        "extproc_redis_seconds_bucket{instance='busy',le='0.1'}": "0+100x70",
        "extproc_redis_seconds_bucket{instance='busy',le='+Inf'}": "0+100x70",
        "extproc_loop_delay_seconds{instance='busy'}": "0.1x70",
    },
}
"""Series of each alert's cause, beside series that must not fire it; a sample a minute."""
QUIET = {"extproc_open_streams{instance='a'}": "0x70"}


def test_firing_of_each_alert_is_tested() -> None:
    assert set(FIRES) == {rule["alert"] for rule in rules()}


@pytest.mark.skipif(not PROMTOOL, reason="promtool is not on the PATH")
@pytest.mark.parametrize("alert", FIRES)
def test_alert_fires_on_its_cause_only(alert: str, tmp_path: Path) -> None:
    firing = f"count(ALERTS{{alertname='{alert}',alertstate='firing'}})"
    tests = [case(FIRES[alert], firing, 1), case(QUIET, "ALERTS")]
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": tests}))
    tested = subprocess.run([PROMTOOL or "", "test", "rules", file], capture_output=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def case(given: dict[str, str], expression: str, *expected: float) -> dict[str, Any]:
    """A test of promtool: series, and the values of an expression over them."""
    samples = [{"labels": "{}", "value": value} for value in expected]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": shown} for name, shown in given.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": AT, "exp_samples": samples}],
    }
