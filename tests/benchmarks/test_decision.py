"""``benchmarks.decision``: every line has its times."""

import json
from pathlib import Path

import pytest

from benchmarks import decision


def test_decision_is_timed_for_every_policy_and_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gc.unfreeze", lambda: None)  # or it would scan the tests' modules, too
    monkeypatch.setattr(decision, "REPLICAS", (1, 3))
    monkeypatch.setattr(decision, "LOADED", ((2, 4),))
    monkeypatch.setattr(decision, "QUEUED", (5, 20))
    report = tmp_path / "decision.json"
    assert decision.main(["--decisions", "50", "--json", str(report)]) == 0
    measured = json.loads(report.read_text())
    settings = ("policy", "replicas", "full", "in_flight", "adapters")
    assert [tuple(run[name] for name in settings) for run in measured["runs"]] == [
        ("completion", 1, False, 30, 0),
        ("completion", 3, False, 90, 0),
        ("least_request", 1, False, 30, 0),
        ("least_request", 3, False, 90, 0),
        ("completion", 1, True, 30, 0),
        ("completion", 3, True, 90, 0),
        ("completion", 2, False, 8, 0),
        ("completion", 2, False, 8, 500),
    ]
    assert [chat["text_bytes"] for chat in measured["chats"]] == [1_000, 10_000, 100_000]
    queues = [(queue["tenants"], queue["queued"]) for queue in measured["queues"]]
    assert queues == [(1, 5), (1, 20), (1_000, 5), (1_000, 20)]
    lines = [line for lines in measured.values() for line in lines]
    times = [us for line in lines for name, us in line.items() if name.endswith("_us")]
    assert min(times) > 0
    assert all(run["median_us"] <= run["p99_us"] for run in measured["runs"])
    assert all(chat["prefix_us"] < chat["profile_us"] for chat in measured["chats"])
    assert len(capsys.readouterr().out.splitlines()) == 3 + len(lines)
