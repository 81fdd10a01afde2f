import json
from pathlib import Path

import pytest

from benchmarks import decision


def test_it_times_every_policy_and_size_of_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decision, "REPLICAS", (1, 3))
    report = tmp_path / "decision.json"
    assert decision.main(["--decisions", "50", "--json", str(report)]) == 0
    measured = json.loads(report.read_text())
    runs, chats = measured["runs"], measured["chats"]
    assert [(run["policy"], run["replicas"], run["full"]) for run in runs] == [
        *[(policy, size, False) for policy in ("completion", "least_request") for size in (1, 3)],
        *[("completion", size, True) for size in (1, 3)],
    ]
    for run in runs:
        assert 0 < run["median_us"] <= run["p99_us"]
        assert run["ledger_us"] > 0
        assert run["poll_us"] > 0
    assert [chat["text_bytes"] for chat in chats] == [1_000, 10_000, 100_000]
    for chat in chats:
        assert 0 < chat["prefix_us"] < chat["profile_us"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(runs) + 1 + len(chats)
