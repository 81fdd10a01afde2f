"""Alert rules and Grafana dashboard use existing metrics, and compose.yaml can run them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.observe.test_reference import DOCS, rules, series

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
