"""The resources for Envoy Gateway, by the Envoy configuration they stand for."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.envoy.check import check_envoy
from extproc.envoy.finding import Level
from tests.envoy_gateway import bootstrap

FILE = Path(__file__).parents[2] / "envoy" / "envoy_gateway.yaml"
RESOURCES = list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))


def translated(resources: list[Any]) -> dict[str, Any]:
    return bootstrap(
        resources, "0.0.0.0:10080", "127.0.0.1:19000", ["10.0.0.1:8000"], ["10.0.0.2:50051"]
    )


def test_what_they_stand_for_lacks_only_what_no_field_is_for() -> None:
    """``max_message_timeout``, without which requests do not wait at the router."""
    findings = check_envoy(translated(RESOURCES))
    lacking = [(one.rule, one.level) for one in findings if one.level is not Level.OK]
    assert lacking == [("waits_for_room", Level.WARNING)]


def test_a_misspelt_field_is_refused() -> None:
    resources = copy.deepcopy(RESOURCES)
    resources[3]["spec"]["extProc"][0]["failOpened"] = True
    with pytest.raises(ValueError, match="no field failOpened"):
        translated(resources)
