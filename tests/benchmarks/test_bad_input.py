"""``benchmarks.simulate`` refuses wrong traces, fleets and phases in one line before it plays."""

import gzip
from pathlib import Path

import pytest

from benchmarks.simulate import main
from tests.benchmarks.conftest import complaint_of

HERE = Path(__file__).parents[2] / "benchmarks"
TRACE = HERE / "traces" / "azure-2023-conv.jsonl.gz"
MIXED = HERE / "fleets" / "mixed.yaml"
REQUEST = '{"timestamp": 0, "input_length": 5, "output_length": 3}\n'


@pytest.fixture(autouse=True)
def _nothing_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(*_: object) -> None:
        raise AssertionError("the simulation began")

    monkeypatch.setattr("benchmarks.simulate._play", play)


def complaint(capsys: pytest.CaptureFixture[str], *given: str | Path) -> str:
    return complaint_of(main, capsys, "--trace", TRACE, "--fleet", MIXED, *given)


def test_phase_that_ends_before_it_begins_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--until 5 is not after --from 9" in complaint(capsys, "--from", "9", "--until", "5")


FIELDS = ('"hash_ids": 5', '"hash_ids": "12"', '"hash_ids": [[1]]', '"max_tokens": "many"')
LINES = (
    *("5", "[1]", "null", "{", '{"timestamp": 0}'),
    *(REQUEST.replace("}", f", {field}}}") for field in FIELDS),
    *(REQUEST.replace(": 0", f": {at}", 1) for at in ("NaN", "Infinity", "-1")),
)


@pytest.mark.parametrize("line", LINES)
def test_line_without_request_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(REQUEST + line.strip() + "\n")
    assert f"{trace}:2 is no request of a trace" in complaint(capsys, "--trace", trace)


def test_unreadable_trace_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cut, plain, binary = (tmp_path / name for name in ("cut.gz", "plain.gz", "binary.jsonl"))
    cut.write_bytes(gzip.compress(REQUEST.encode() * 1000)[:-20])
    plain.write_text(REQUEST)
    binary.write_bytes(b"\xff\xfe\xfd")
    for trace in (cut, plain, binary, tmp_path / "none.jsonl"):
        assert str(trace) in complaint(capsys, "--trace", trace)

    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert f"{empty} has no requests" in complaint(capsys, "--trace", empty)


GROUP = "{name: a, profile: llama-8b-a10}"
FLEETS = {
    f"replicas: [{GROUP}, {GROUP}]": "'a'",
    "replicas: [{name: a, profile: llama-8b-a1}]": "did you mean 'llama-8b-a10'?",
    "replicas: [{name: a, profile: llama-8b-a10, count: 0}]": "replicas.0.count: ",
    "replicas: [{name: a, profile: llama-8b-a10, size: 3}]": "replicas.0.size: ",
    "replicas: [{name: a, profile: llama-8b-a10, draft_tokens: 8}]": "token budget 2048",
    "replicas: []": "replicas: ",
    "[": "line 1",
    "": "dictionary",
    **{
        f"replicas: [{GROUP}]\nevents: [{{replica: a-0, {event}}}]": "events.0"
        for event in (
            *("at: .inf, down", "at: .nan, down", "at: 1, slow: .inf", "at: 1, slow: 0"),
            *("at: 1", "at: 1, slow: 2, down"),
        )
    },
    f"replicas: [{GROUP}]\nevents: [{{at: 1, replica: b-0, down}}]": "no replica is called 'b-0'",
}


@pytest.mark.parametrize(("text", "wrong"), FLEETS.items())
def test_wrong_fleet_file_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, wrong: str
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    line = complaint(capsys, "--fleet", file)
    assert str(file) in line
    assert wrong in line
