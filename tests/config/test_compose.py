"""compose.yaml sets valid settings, and agrees with the defaults of others."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.cli import main
from extproc.config import ServeSettings
from extproc.settings import load
from tests.conftest import Cli

COMPOSE = Path(__file__).parents[2] / "compose.yaml"


def service(name: str) -> dict[str, Any]:
    """Returns the service as Docker reads it if no variable is set."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text(encoding="utf-8"))
    found: dict[str, Any] = yaml.safe_load(text)["services"][name]
    return found


def test_docker_stop_waits_longer_than_drain_s() -> None:
    assert float(service("router")["stop_grace_period"].removesuffix("s")) > ServeSettings().drain_s


@pytest.mark.parametrize("name", ["router", "poller"])
def test_compose_environment_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in service(name)["environment"].items():
        monkeypatch.setenv(key, value)
    assert main(["check"]) == 0
    replicas = load({}, os.environ).replicas
    assert [(replica.where, replica.profile) for replica in replicas] == [
        ("first:8000", "llama-8b-h100"),
        ("second:8000", "llama-8b-a10"),
    ]


@pytest.mark.parametrize("replicas", [("fast", "slow"), ("vllm-0", "vllm-1")])
def test_names_of_replicas_resolve_whichever_replicas_run(replicas: tuple[str, ...]) -> None:
    """A name without an address would be a warning on the page, and an alert."""
    names = re.findall(r'dns: "(\w+):', service("poller")["environment"]["EXTPROC_REPLICAS"])
    aliases = [service(name)["networks"]["default"]["aliases"] for name in replicas]
    assert {*names} <= {alias for each in aliases for alias in each}


@pytest.mark.parametrize("name", ["fast", "slow"])
def test_simulated_replicas_have_valid_arguments(name: str, cli: Cli) -> None:
    printed, _ = cli(*service(name)["command"], "--help")
    assert printed[0].startswith("usage: extproc simulate")
