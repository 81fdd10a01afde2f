"""``benchmarks.agents``: its trace depends only on the seed."""

import gzip
from pathlib import Path

from benchmarks.agents import main

STORED = Path(__file__).parents[2] / "benchmarks" / "traces" / "agents.jsonl.gz"


def test_stored_trace_is_reproduced(tmp_path: Path) -> None:
    made = tmp_path / "agents.jsonl.gz"
    assert main([str(made)]) == 0
    assert gzip.decompress(made.read_bytes()) == gzip.decompress(STORED.read_bytes())
    assert main([str(made), "--seed", "2"]) == 0
    assert gzip.decompress(made.read_bytes()) != gzip.decompress(STORED.read_bytes())
