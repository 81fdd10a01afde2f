"""``benchmarks.decision``: every line has its times."""

import json
from pathlib import Path

import pytest

from benchmarks import decision


def test_decision_is_timed_for_every_policy_and_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decision, "REPLICAS", (1, 3))
    monkeypatch.setattr(decision, "LOADED", ((2, 4),))
    monkeypatch.setattr(decision, "QUEUED", (5, 20))
    report = tmp_path / "decision.json"
    assert decision.main(["--decisions", "50", "--json", str(report)]) == 0
    measured = json.loads(report.read_text())
    runs, chats = measured["runs"], measured["chats"]
    assert [(run["policy"], run["replicas"], run["full"]) for run in runs] == [
        *[(policy, size, False) for policy in ("completion", "least_request") for size in (1, 3)],
        *[("completion", size, True) for size in (1, 3)],
        *[("completion", 2, False)] * 2,
    ]
    assert [(run["in_flight"], run["adapters"]) for run in runs[-2:]] == [(8, 0), (8, 500)]
    for run in runs:
        assert 0 < run["median_us"] <= run["p99_us"]
        assert run["ledger_us"] > 0
        assert run["poll_us"] > 0
    assert [chat["text_bytes"] for chat in chats] == [1_000, 10_000, 100_000]
    for chat in chats:
        assert 0 < chat["prefix_us"] < chat["profile_us"]
    queues = measured["queues"]
    assert [(queue["tenants"], queue["queued"]) for queue in queues] == [
        (tenants, queued) for tenants in (1, 1_000) for queued in (5, 20)
    ]
    for queue in queues:
        assert queue["arrival_us"] > 0
        assert queue["end_us"] > 0
    lines = len(capsys.readouterr().out.splitlines())
    assert lines == 3 + len(runs) + len(chats) + len(queues)
