"""``docs/compare.md``: its tables are those of the figures that are kept, and nothing else."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import page
from tests.benchmarks.test_report import compared, request


def test_the_tables_are_those_of_the_figures_that_are_kept() -> None:
    _, made, _ = page.parts(page.PAGE.read_text())
    assert made == page.tables(), "run: python -m benchmarks.compare.page"


def test_every_source_that_a_claim_names_is_listed() -> None:
    text = page.PAGE.read_text()
    listed = set(re.findall(r"^\[([\w-]+)\]: https://\S+$", text, re.MULTILINE))
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == listed


def test_a_figure_in_doubt_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = shutil.copytree(page.KEPT, tmp_path / "results")
    of = json.loads((kept / "overload.json").read_text())
    for one in of["figures"]["contenders"].values():
        one["in_doubt"] = 0
    of["figures"]["contenders"]["router:completion"]["in_doubt"] = 1
    (kept / "overload.json").write_text(json.dumps(of))
    monkeypatch.setattr(page, "KEPT", kept)
    table = page.tables().partition("### Overload")[2].partition("###")[0]
    marked = [row for row in table.splitlines() if " ! |" in row]
    assert [row[:22] for row in marked] == ["| **this router** ! | "]


def test_the_picture_has_a_row_for_each_product() -> None:
    pytest.importorskip("matplotlib")
    assert page.picture().startswith(b"\x89PNG")


def test_of_a_measurement_its_figures_are_kept_and_no_path() -> None:
    of = page.figures(_fault())
    assert of["about"]["command"] == "python -m benchmarks.compare --fault replica-killed"
    assert of["contenders"]["router:completion"] == {
        "requests": 3,
        "failed": 2,
        "harm": [{"hit": 1, "failed": 2, "slowest_s": 4.0}],
    }
    assert "at_s" not in json.dumps(of)


def test_interrupted_measurement_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def call(command: list[str], cwd: Path) -> int:
        written = Path(command[command.index("--json") + 1])
        written.write_text(json.dumps(_fault()))
        asked.append(written.stem)
        return -15 if len(asked) == 3 else 1  # 1: measured, and something was wrong in it

    monkeypatch.setattr(page, "KEPT", tmp_path)
    monkeypatch.setattr(subprocess, "call", call)
    names = [part.name for part in page.MEASURED]
    assert not page.measure(tmp_path / "measured", None)
    assert {path.stem for path in tmp_path.glob("*.json")} == set(names[:2])
    assert page.measure(tmp_path / "measured", None)
    assert asked == names[:3] + names[2:]
    assert {path.stem for path in tmp_path.glob("*.json")} == set(names)


def _fault() -> dict[str, Any]:
    """Turn in which a replica is killed after 1 s: a request in flight on it and one sent
    afterwards fail.
    """
    fails = {"completion_s": None, "ttft_s": None, "error": "disconnected", "failed_after_s": 4.0}
    requests = [
        request(0, 1.0, at_s=0.2),
        request(1, 1.0, at_s=0.5, struck=True, **fails),
        request(2, 1.0, at_s=1.5, **fails),
    ]
    of: dict[str, Any] = {"run": {"name": "router:completion", "repeat": 0}, "requests": requests}
    fault = {"name": "replica-killed", "at_s": 1.0}
    command = "python -m benchmarks.compare --fault replica-killed --programs /a/b --json /c/d"
    about = {"fault": fault, "command": command, "date": "", "commit": None, "versions": {}}
    return compared(of | {"fault": fault}, **about) | {"figures": {}}
