"""compose.yaml agrees with the settings it does not set."""

from pathlib import Path

import yaml

from extproc.config import ServeSettings

COMPOSE = Path(__file__).parents[2] / "compose.yaml"


def test_docker_waits_until_a_router_has_drained() -> None:
    router = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]["router"]
    assert float(router["stop_grace_period"].removesuffix("s")) > ServeSettings().drain_s
