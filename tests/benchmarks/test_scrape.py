"""``python -m benchmarks.scrape``."""

import json
from pathlib import Path

import pytest

from benchmarks.scrape import main


@pytest.mark.process
def test_a_poller_is_measured_at_its_work(tmp_path: Path) -> None:
    file = tmp_path / "scrape.json"
    assert main(["--replicas", "3", "--seconds", "1", "--json", str(file)]) == 0
    cost = json.loads(file.read_text())
    assert cost["page_us"] > 0
    assert cost["scrapes_per_s"] > 3
    assert 0 < cost["core"] < 2
