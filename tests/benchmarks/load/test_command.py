"""The command: what it says, writes and ends with."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any
from urllib.request import urlopen

import pytest

from benchmarks import trace
from benchmarks.load.__main__ import main

TRACE = Path(__file__).parents[3] / "benchmarks" / "traces" / "azure-2023-conv.jsonl.gz"


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The line that says what is wrong; of two options alike the last one counts."""
    given = ["--url", "http://127.0.0.1:9", "--trace", str(TRACE), *map(str, arguments)]
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(given))
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    return output.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--speed", ("0", "-1", "inf", "nan", "fast")),
        ("--duration", ("0", "nan")),
        ("--from", ("-1", "inf", "nan")),
        ("--stream-share", ("-0.1", "1.1", "nan", "half")),
        ("--requests", ("0", "1.5")),
        ("--timeout", ("0", "inf")),
        ("--context", ("0", "-1")),
        ("--url", ("127.0.0.1:8080", "ftp://a", "http://", "", "http://a:99999")),
    ],
)
def test_a_value_that_makes_no_sense(
    capsys: pytest.CaptureFixture[str], option: str, values: tuple[str, ...]
) -> None:
    for value in values:
        assert f"argument {option}: {value!r} is not" in complaint(capsys, f"{option}={value}")


def test_an_endpoint_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "--endpoint", "chat,embeddings")
    assert "'embeddings' is none of chat, completions" in line


def test_a_trace_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert str(tmp_path / "none.jsonl") in complaint(capsys, "--trace", tmp_path / "none.jsonl")


def test_a_time_in_which_nothing_arrives(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 9000, "input_length": 5, "output_length": 3}\n')
    assert "first 2 s" in complaint(capsys, "--trace", trace, "--duration", "2")
    line = complaint(capsys, "--trace", trace, "--from", "3", "--duration", "6")
    assert "first 6 s from 3 s on" in line
    assert "from 10 s on" in complaint(capsys, "--trace", trace, "--from", "10")


def test_a_report_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "nowhere" / "report.json"
    assert str(path) in complaint(capsys, "--json", path)


def test_nobody_answers(capsys: pytest.CaptureFixture[str], unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    line = complaint(capsys, "--url", url)
    assert line.startswith(f"load: {url} cannot be reached: ")


def test_pictures_that_cannot_be_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "file"
    file.touch()
    assert str(file) in complaint(capsys, "--report", file)


@pytest.fixture
def replica() -> Iterator[str]:
    command = [sys.executable, "-m", "extproc", "simulate", "--port", "0", "--speed", "20"]
    with Popen(command, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


@pytest.mark.process
def test_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, replica: str) -> None:
    path = tmp_path / "load.json"
    given = ["--url", f"{replica}/v1", "--trace", str(TRACE), "--speed", "50"]
    options = ["--requests", "40", "--stream-share", "0.5", "--policy-header", "round_robin"]
    page = tmp_path / "report"
    assert main([*given, *options, "--json", str(path), "--report", str(page)]) == 0
    output = capsys.readouterr()
    assert (page / "index.html").is_file()
    assert "40 of 40 requests answered" in output.out
    assert output.err == ""
    result = json.loads(path.read_text())
    assert result["run"]["name"] == result["run"]["policy"] == "round_robin"
    assert result["summary"]["output_tokens"]["planned"] > 1000
    for tokens in ("prompt_tokens", "output_tokens"):
        counts = result["summary"][tokens]
        assert counts["counted"] == counts["planned"]
    assert [*result["summary"]["replicas"]] == [replica.removeprefix("http://")]
    assert 5 < sum(one["streamed"] for one in result["requests"]) < 35
    assert {one["endpoint"] for one in result["requests"]} == {"chat", "completions"}


@pytest.mark.process
def test_parts_follow_each_other_and_a_seed_sends_the_same_again(
    tmp_path: Path, replica: str
) -> None:
    def sent(*options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        path = tmp_path / "load.json"
        given = ["--url", replica, "--trace", str(TRACE), "--speed", "50", "--duration", "0.5"]
        assert main([*given, *options, "--json", str(path)]) == 0
        result = json.loads(path.read_text())
        return result["run"], result["requests"]

    _, first = sent()
    about, second = sent("--from", "0.5")
    assert about["from_s"] == 0.5
    both = trace.read([TRACE], 50, len(first) + len(second))
    times = [one["at_s"] for one in first] + [0.5 + one["at_s"] for one in second]
    assert times == pytest.approx([one.at for one in both])
    hits = [cached_tokens(replica)]
    for _ in range(2):
        sent("--seed", "1")
        hits.append(cached_tokens(replica))
    assert hits[2] - hits[1] > hits[1] - hits[0] + 100


def cached_tokens(replica: str) -> float:
    """Prompt tokens that the replica found in its prefix cache, so far."""
    with urlopen(f"{replica}/metrics") as page:
        lines = page.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total")]
    return float(line.split()[-1])


@pytest.mark.process
def test_a_run_of_which_some_failed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, replica: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 50, "output_length": 5, "max_tokens": 16}
    trace.write_text(json.dumps(line) + "\n" + json.dumps(line | {"output_length": 9_000}))
    given = ["--url", replica, "--trace", str(trace), "--known-lengths", "--timeout", "2"]
    assert main(given) == 1
    output = capsys.readouterr().out
    assert "1 of 2 requests answered" in output
    assert "failed: 1 × timeout" in output


@pytest.mark.process
def test_another_model(capsys: pytest.CaptureFixture[str], replica: str) -> None:
    line = complaint(capsys, "--url", replica, "--model", "other")
    assert "status 404" in line
    assert "`other` does not exist" in line
