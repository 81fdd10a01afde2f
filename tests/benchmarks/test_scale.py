"""``benchmarks.scale``: routers know every replica, and all figures are measured."""

import json
from pathlib import Path

import pytest

from benchmarks.scale.__main__ import main


@pytest.mark.process
def test_scale_measures_routers_and_redis(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    arguments = ["--replicas", "3", "--routers", "2", "--seconds", "1", "--json", str(file)]
    assert main(arguments) == 0
    (run,) = json.loads(file.read_text())["runs"]
    assert [router["replicas"] for router in run["each"]] == [3, 3]
    assert all(router["decisions"] > 0 for router in run["each"])
    assert run["redis"]["commands"] > 0
    assert run["redis"]["bytes_out"] > 0
