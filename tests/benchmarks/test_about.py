"""Origin of a result: command, versions and commit."""

import re
from pathlib import Path
from subprocess import check_call

import pytest

from benchmarks.arguments import about


def test_result_has_command_and_versions() -> None:
    made = about("benchmarks.load", ["--url", "http://a b"])
    assert made["command"] == "python -m benchmarks.load --url 'http://a b'"
    assert {"python", "extproc", "grpcio", "numpy"} <= made["versions"].keys()


def test_result_has_commit_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.arguments._ROOT", tmp_path)
    assert about("benchmarks.load", [])["commit"] is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("as committed")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        check_call([*git, *command])
    commit = about("benchmarks.load", [])["commit"]
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    (tmp_path / "file").write_text("changed")
    assert about("benchmarks.load", [])["commit"] == f"{commit}-dirty"
