"""Outputs of the running processes equal the golden files.

``python -m tests.golden.record`` rewrites the files after an intended change.
"""

import difflib
from pathlib import Path

import pytest

from tests.golden import cells
from tests.golden.stage import FOLDER, collect


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("golden")
    return collect(folder)


@pytest.mark.process
@pytest.mark.parametrize(
    "name", ["help.txt", "conversations.json", "decisions.json", "metrics.txt", "record.json"]
)
def test_golden_file_is_unchanged(name: str, texts: dict[str, str]) -> None:
    recorded = (FOLDER / name).read_text()
    lines = (recorded.splitlines(), texts[name].splitlines())
    changes = list(difflib.unified_diff(*lines, "recorded", "now", lineterm=""))
    assert not changes, "\n".join(changes[:200])


@pytest.mark.process
@pytest.mark.parametrize("name", cells.TINY)
def test_simulation_of_first_requests_is_unchanged(name: str) -> None:
    figures = cells.run(name, cells.TINY_REQUESTS)
    assert figures == cells.recorded()[f"{name}/tiny"]
