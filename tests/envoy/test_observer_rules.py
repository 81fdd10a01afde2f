"""``extproc check --envoy`` on an Envoy beside which a router only observes."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config import Config
from extproc.envoy.check import check_envoy
from extproc.envoy.finding import Finding, Level
from extproc.envoy.observer_rules import OBSERVER_RULES
from extproc.lab.harness.envoy_config import manager_of

FILE = Path(__file__).parents[2] / "envoy" / "observe.yaml"
GOOD = yaml.safe_load(FILE.read_text(encoding="utf-8"))
OBSERVE = Config.model_validate({"serve": {"mode": "observe"}})


def found(tree: object, config: Config = OBSERVE) -> list[Finding]:
    return check_envoy(tree, config)


def complaints(tree: object, config: Config = OBSERVE) -> list[tuple[str, Level]]:
    findings = found(tree, config)
    return [(finding.rule, finding.level) for finding in findings if finding.level is not Level.OK]


UNJUDGED = {"transport_matches", "mapped_port_leads_to_router"}


def test_shipped_file_passes_every_rule() -> None:
    rules = {rule.id for rule in OBSERVER_RULES} | {"is_complete"}
    assert {finding.rule for finding in found(GOOD)} == rules - UNJUDGED
    assert complaints(GOOD) == []


def test_filter_that_asks_another_server_is_not_judged() -> None:
    tree = copy.deepcopy(GOOD)
    filters = manager_of(tree)["http_filters"]
    config = {"@type": filters[0]["typed_config"]["@type"]}
    filters.insert(0, {"name": "other", "typed_config": config, "disabled": True})
    assert complaints(tree) == []


def test_router_that_routes_is_ignored() -> None:
    assert complaints(GOOD, Config()) == [("router_is_ignored", Level.ERROR)]


Change = Callable[[dict[str, Any], dict[str, Any]], object]  # of the manager and the filter


@pytest.mark.parametrize(
    ("rule", "level", "change"),
    [
        ("bodies_are_copied", Level.ERROR,
         lambda _, ext_proc: ext_proc["processing_mode"].update(request_body_mode="BUFFERED")),
        ("responses_are_sampled", Level.WARNING,
         lambda manager, _: manager["route_config"]["virtual_hosts"][0]["routes"].pop(0)),
        ("end_is_told_soon", Level.WARNING,
         lambda _, ext_proc: ext_proc.pop("deferred_close_timeout")),
        ("routes_can_match", Level.ERROR,
         lambda manager, _: manager["route_config"]["virtual_hosts"][0]["routes"].reverse()),
        ("fails_open", Level.ERROR, lambda _, ext_proc: ext_proc.pop("failure_mode_allow")),
    ],
)  # fmt: skip
def test_broken_rule_is_only_finding(rule: str, level: Level, change: Change) -> None:
    tree = copy.deepcopy(GOOD)
    manager = manager_of(tree)
    change(manager, manager["http_filters"][0]["typed_config"])
    assert set(complaints(tree)) == {(rule, level)}
