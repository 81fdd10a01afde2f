"""Rules and dashboard of docs/observability/ ask for what routers and pollers show."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.observe.test_reference import DOCS, labels, series

FOLDER = DOCS / "observability"
RULES = FOLDER / "rules.yaml"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
COMPOSE = yaml.safe_load((DOCS.parent / "compose.yaml").read_text(encoding="utf-8"))["services"]
BY_PROMETHEUS = {"instance", "job", "le"}
OF_COUNTERS = {"rate of a range", "increase of a range"}
PROMTOOL = shutil.which("promtool")
with_promtool = pytest.mark.skipif(not PROMTOOL, reason="promtool is not on the PATH")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [one for one in DASHBOARD["panels"] if one["type"] != "row"]


def expressions() -> dict[str, str]:
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for panel in panels():
        for target in panel["targets"]:
            found[f"{panel['title']}, {target['refId']}"] = target["expr"]
    return {name: text.replace("$__rate_interval", "5m") for name, text in found.items()}


def selectors(node: Any, inside: str = "") -> Iterator[tuple[str, set[str], str]]:
    """Each one's metric, the labels it matches, and the function that gets it as a range."""
    match node:
        case promql.VectorSelector():
            yield node.name or "", {one.name for one in node.matchers.matchers}, inside
        case promql.MatrixSelector():
            yield from selectors(node.vector_selector, f"{inside} of a range")
        case promql.Call():
            for argument in node.args:
                yield from selectors(argument, node.func.name)
        case promql.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case promql.AggregateExpr() | promql.ParenExpr():
            yield from selectors(node.expr)
        case _:
            assert isinstance(node, promql.NumberLiteral), type(node)


@pytest.mark.parametrize(("name", "text"), expressions().items(), ids=expressions())
def test_an_expression_asks_for_what_is_shown_as_what_it_is(name: str, text: str) -> None:
    asked = list(selectors(promql.parse(text)))
    assert asked
    for metric, matched, function in asked:
        assert (function in OF_COUNTERS) == (series()[metric] == "counter"), metric
        assert matched <= labels()[metric] | BY_PROMETHEUS


@pytest.mark.parametrize(("name", "text"), expressions().items(), ids=expressions())
def test_an_expression_groups_by_labels_that_there_are(name: str, text: str) -> None:
    def check(node: Any) -> None:
        if isinstance(node, promql.AggregateExpr):
            grouped = set(node.modifier.labels) if node.modifier else set()
            for metric, _, _ in selectors(node.expr):
                assert grouped <= labels()[metric] | BY_PROMETHEUS
        for part in ("lhs", "rhs", "expr"):
            if (inner := getattr(node, part, None)) is not None:
                check(inner)
        for inner in getattr(node, "args", ()):
            check(inner)

    check(promql.parse(text))


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_legends_name_labels_that_the_expression_leaves() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for word in target["legendFormat"].split("{{")[1:]:
                assert word.partition("}}")[0] in target["expr"], target


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not own & taken
        assert max(x for x, _ in own) < 24
        taken |= own


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_compose_brings_files_that_are_there_and_shows_nothing_to_others(name: str) -> None:
    service = COMPOSE[name]
    assert service["profiles"] == ["observe"]
    assert service["image"].rpartition(":")[2] not in ("", "latest")
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    for volume in service["volumes"]:
        here, _, mode = volume.split(":")
        assert (DOCS.parent / here).exists()
        assert mode == "ro"


def test_prometheus_finds_routers_pollers_and_rules_and_grafana_finds_it() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    (source,) = yaml.safe_load(
        (FOLDER / "provisioning" / "datasources" / "prometheus.yaml").read_text(encoding="utf-8")
    )["datasources"]
    targets = [target for job in config["scrape_configs"] for one in job["static_configs"]
               for target in one["targets"]]  # fmt: skip
    for target in targets:
        service, _, port = target.partition(":")
        setting = {"router": "EXTPROC_SERVE__ADMIN", "poller": "EXTPROC_POLL__ADMIN"}[service]
        assert COMPOSE[service]["environment"][setting].endswith(f":{port}")
    assert len(targets) == 2
    mounted = {volume.split(":")[1] for volume in COMPOSE["prometheus"]["volumes"]}
    assert set(config["rule_files"]) < mounted
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load(
        (FOLDER / "provisioning" / "dashboards" / "extproc.yaml").read_text(encoding="utf-8")
    )["providers"]
    home = COMPOSE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert home in {volume.split(":")[1] for volume in COMPOSE["grafana"]["volumes"]}


@with_promtool
def test_promtool_takes_the_rules() -> None:
    checked = subprocess.run([PROMTOOL or "", "check", "rules", RULES], capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(rules())} rules found".encode() in checked.stdout


FIRES = {
    "ExtprocNoNews": {"extproc_state_age_seconds{instance='a'}": "0+60x10"},
    "ExtprocReplicaLeftOut": {"extproc_replica_left_out{replica='a',reason='failing'}": "1x10"},
    "ExtprocReplicaFails": {
        "extproc_failures_total{replica='a'}": "0+10x10",
        "extproc_decisions_total{replica='a',policy='completion'}": "0+100x10",
    },
    "ExtprocTooFewReplicas": {
        "extproc_replicas_needed{pool='p',instance='a'}": "2x10",
        "extproc_replicas_needed{pool='p',instance='b'}": "2x10",
        "extproc_poll_replicas_healthy{pool='p',instance='c'}": "3x10",
    },
}
QUIET = {"extproc_open_streams{instance='a'}": "0x10"}


@with_promtool
@pytest.mark.parametrize("alert", FIRES)
def test_an_alert_fires_when_it_should(alert: str, tmp_path: Path) -> None:
    def values(given: dict[str, str]) -> list[dict[str, str]]:
        return [{"series": name, "values": shown} for name, shown in given.items()]

    count = f"count(ALERTS{{alertname='{alert}',alertstate='firing'}})"
    asked = [{"expr": count, "eval_time": "9m", "exp_samples": [{"labels": "{}", "value": 1}]}]
    none = [{"expr": "ALERTS", "eval_time": "9m", "exp_samples": []}]
    fires = {"interval": "1m", "input_series": values(FIRES[alert]), "promql_expr_test": asked}
    quiet = {"interval": "1m", "input_series": values(QUIET), "promql_expr_test": none}
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [fires, quiet]}))
    tested = subprocess.run([PROMTOOL or "", "test", "rules", file], capture_output=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr
