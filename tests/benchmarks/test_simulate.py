import gzip
import json
from pathlib import Path

import pytest

from benchmarks import fleet, trace
from benchmarks.discrete import Simulation
from benchmarks.simulate import main
from extproc.route.policies import POLICIES

HERE = Path(__file__).parents[2] / "benchmarks"
CONVERSATION = HERE / "traces" / "azure-2023-conv.jsonl.gz"
MIXED = HERE / "fleets" / "mixed.yaml"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_the_ledger_is_empty(policy: str) -> None:
    requests = trace.read([CONVERSATION], speed=4, most=300)
    simulation = Simulation(fleet.read(MIXED), policy)
    served = list(simulation.run(requests))
    assert len(served) == 300
    assert all(0 < one.ttft <= one.completion for one in served)
    assert simulation.fleet.in_flight == 0


def test_the_same_seed_gives_the_same_run() -> None:
    requests = trace.read([CONVERSATION], speed=4, most=200)
    runs = [
        [
            one.completion
            for one in Simulation(fleet.read(MIXED), "completion", seed=3).run(requests)
        ]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_prediction_beats_counting_where_replicas_differ(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["--trace", str(CONVERSATION), "--fleet", str(MIXED), "--speed", "4"]
    arguments += ["--policy", "completion,lmetric", "--requests", "1500", "--json", str(report)]
    assert main(arguments) == 0
    ours, theirs = json.loads(report.read_text())["runs"]
    assert ours["e2e_s"]["p99"] < 0.5 * theirs["e2e_s"]["p99"]
    assert ours["ttft_s"]["p99"] < 0.5 * theirs["ttft_s"]["p99"]
    assert sum(one["requests"] for one in ours["per_replica"].values()) == 1500


def test_traces_are_merged_by_time(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]
    files[0].write_text('{"timestamp": 2000, "input_length": 5, "output_length": 3}\n')
    with gzip.open(files[1], "wt") as lines:
        lines.write('{"timestamp": 1000, "input_length": 7, "output_length": 1, "max_tokens": 9}\n')
    first, second = trace.read(files, speed=2)
    assert (first.at, first.prompt_tokens, first.max_tokens) == (0.5, 7, 9)
    assert (second.at, second.max_tokens) == (1.0, None)


def test_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"timestamp": 1}\n')
    assert main(["--trace", str(file), "--fleet", str(MIXED)]) == 2
    assert f"{file}:1" in capsys.readouterr().err
