"""docs/failure-modes.md has a row for each scene, with its alert and what the page says."""

import re
from pathlib import Path

import pytest

from tests.chaos.prometheus import longest_s
from tests.chaos.scenes import SCENES, ChaosScene

PAGE = Path(__file__).parents[2] / "docs" / "failure-modes.md"
MOST_S = 300.0


def rows() -> dict[str, str]:
    """Rows of the table by the name of the scene."""
    found = re.findall(r"^\| `([a-z0-9-]+)` \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    return dict(found)


def test_page_has_a_row_for_each_scene_in_the_same_order() -> None:
    assert list(rows()) == [scene.name for scene in SCENES]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_row_names_alert_and_says_what_the_page_says(scene: ChaosScene) -> None:
    row = rows()[scene.name]
    alerts = re.findall("`(Extproc[A-Za-z]+)`", row)
    assert alerts == ([scene.signs.alert] if scene.signs.alert else [])
    assert re.search(scene.signs.page or "^nothing$", row.split(" | ")[3])


@pytest.mark.parametrize("alert", sorted({scene.signs.alert for scene in SCENES} - {""}))
def test_alert_fires_within_five_minutes(alert: str) -> None:
    assert longest_s(alert) <= MOST_S
