"""Traces: merged by time, cut into parts, with hashes of shared prefixes, and made anew."""

import gzip
from pathlib import Path

import pytest

from benchmarks import agents, trace
from tests.benchmarks.conftest import TRACES


def test_traces_are_merged_by_time(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]
    files[0].write_text('{"timestamp": 2000, "input_length": 5, "output_length": 3}\n')
    with gzip.open(files[1], "wt") as lines:
        lines.write('{"timestamp": 1000, "input_length": 7, "output_length": 1, "max_tokens": 9}\n')
    first, second = trace.read(files, speed=2)
    assert (first.at, first.prompt_tokens, first.max_tokens) == (0.5, 7, 9)
    assert (second.at, second.max_tokens) == (1.0, None)


def test_later_part_is_timed_from_its_start(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    line = '{{"timestamp": {}, "input_length": {}, "output_length": 3}}\n'
    file.write_text("".join(line.format(1000 * second, second) for second in (1, 4, 6, 9)))
    part = trace.read([file], speed=2, most=2, start=2.0)
    assert [(request.at, request.prompt_tokens) for request in part] == [(0.0, 4), (1.0, 6)]
    assert trace.read([file], speed=2, start=2.0, duration=1.5) == part
    with pytest.raises(ValueError, match="has no requests from 5 s on"):
        trace.read([file], speed=2, start=5.0)
    with pytest.raises(ValueError, match=r"in the first 0\.5 s from 3\.5 s on"):
        trace.read([file], speed=2, start=3.5, duration=0.5)


def test_hash_id_stands_for_512_tokens() -> None:
    def hashes(*ids: int, tokens: int) -> list[int]:
        return trace.TracedRequest(0.0, tokens, 1, None, ids).block_hashes(128)

    five = hashes(7, 9, tokens=640)
    assert len(five) == len(set(five)) == 5
    assert hashes(7, 8, tokens=800)[:4] == five[:4]
    assert hashes(7, tokens=8000) == five[:4]


def test_stored_trace_of_agents_depends_only_on_the_seed(tmp_path: Path) -> None:
    made, stored = tmp_path / "agents.jsonl.gz", TRACES / "agents.jsonl.gz"
    for seed, same in (([], True), (["--seed", "2"], False)):
        assert agents.main([str(made), *seed]) == 0
        equal = gzip.decompress(made.read_bytes()) == gzip.decompress(stored.read_bytes())
        assert equal is same
