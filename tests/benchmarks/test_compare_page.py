"""``docs/compare.md``: its tables show the stored figures and nothing else."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import page
from tests.benchmarks.test_report import compared, request


def test_tables_show_the_stored_figures() -> None:
    _, generated, _ = page.parts(page.PAGE.read_text())
    assert generated == page.tables(), "run: python -m benchmarks.compare.page"


def test_every_source_of_a_claim_is_listed() -> None:
    text = page.PAGE.read_text()
    listed = set(re.findall(r"^\[([\w-]+)\]: https://\S+$", text, re.MULTILINE))
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == listed


def test_figure_in_doubt_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = shutil.copytree(page.RESULTS, tmp_path / "results")
    overload = json.loads((results / "overload.json").read_text())
    contenders = overload["figures"]["contenders"]
    for name in contenders:
        contenders[name]["in_doubt"] = int(name == "router:completion")
    (results / "overload.json").write_text(json.dumps(overload))
    monkeypatch.setattr(page, "RESULTS", results)
    table = page.tables().partition("### Overload")[2].partition("###")[0]
    marked = [row for row in table.splitlines() if " ! |" in row]
    assert [row[:22] for row in marked] == ["| **this router** ! | "]


def test_picture_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    assert page.picture().startswith(b"\x89PNG")


def test_stored_figures_have_neither_requests_nor_local_paths() -> None:
    stored = page.figures(_fault())
    assert stored["about"]["command"] == "python -m benchmarks.compare --fault replica-killed"
    assert stored["contenders"]["router:completion"] == {
        "requests": 3,
        "failed": 2,
        "harm": [{"hit": 1, "failed": 2, "slowest_s": 4.0}],
    }
    assert "at_s" not in json.dumps(stored)


def test_interrupted_measurement_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def call(command: list[str], cwd: Path) -> int:
        written = Path(command[command.index("--json") + 1])
        written.write_text(json.dumps(_fault()))
        measured.append(written.stem)
        return -15 if len(measured) == 3 else 1  # 1: measured, but a run went wrong

    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(subprocess, "call", call)
    names = [measurement.name for measurement in page.MEASUREMENTS]
    assert not page.measure(tmp_path / "measured", None)
    assert {path.stem for path in tmp_path.glob("*.json")} == set(names[:2])
    assert page.measure(tmp_path / "measured", None)
    assert measured == names[:3] + names[2:]
    assert {path.stem for path in tmp_path.glob("*.json")} == set(names)


def _fault() -> dict[str, Any]:
    """Turn in which a replica is killed after 1 s: a request in flight and a later request fail."""
    fails = {"completion_s": None, "ttft_s": None, "error": "disconnected", "failed_after_s": 4.0}
    requests = [
        request(0, 1.0, at_s=0.2),
        request(1, 1.0, at_s=0.5, struck=True, **fails),
        request(2, 1.0, at_s=1.5, **fails),
    ]
    turn: dict[str, Any] = {"run": {"name": "router:completion", "repeat": 0}, "requests": requests}
    fault = {"name": "replica-killed", "at_s": 1.0}
    command = "python -m benchmarks.compare --fault replica-killed --programs /a/b --json /c/d"
    about = {"fault": fault, "command": command, "date": "", "commit": None, "versions": {}}
    return compared(turn | {"fault": fault}, **about) | {"figures": {}}
