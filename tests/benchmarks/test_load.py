"""``benchmarks.load``: figures and warnings of a run, refused arguments, and runs on a replica."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from subprocess import PIPE, Popen
from typing import Any

import pytest

from benchmarks.load.__main__ import main
from benchmarks.load.plan import OBJECTIVE_HEADER, Counting, LoadTarget, Planned, plan, with_urgent
from benchmarks.load.summary import Effort, record, summary, table
from benchmarks.trace import TracedRequest
from extproc.lab.harness.pages import get_text, samples_of
from extproc.lab.harness.processes import free_port
from extproc.lab.harness.traffic import Answer, Client
from tests.benchmarks.conftest import CONVERSATION, complaint_of

IDLE = Effort(0.1, 0.1)


def answer(number: int, late_s: float = 0.0, generated: int = 10, problem: str = "") -> Answer:
    usage = {"prompt_tokens": 100, "completion_tokens": generated}
    replica = "a" if number % 2 else "b"
    times = 0.1 * number, 1.0
    return Answer(str(number), *times, problem, late_s=late_s, replica=replica, usage=usage)


def summed(*answers: Answer, effort: Effort = IDLE, excluded: int = 0) -> dict[str, Any]:
    client = Client("http://nowhere")
    client.answers = {each.request_id: each for each in answers}
    planned = Planned(1, TracedRequest(0.0, 100, 10, None), "chat", True, None, False)
    records = [record(planned, each) for each in answers]
    return summary(records, client, effort, 5.0, excluded)


def test_urgent_requests_have_a_header_and_a_line() -> None:
    target = LoadTarget("tiny", None, {"chat": Counting.of((10, 12), (20, 22))})
    traced = [TracedRequest(0.0, 10, 10, None)] * 1000
    planned = plan(traced, target, 1.0, False, Random(0))
    planned = with_urgent(planned, 0.3, Random(0))
    requests = [each.request(target, "", "run", {}) for each in planned]
    objectives = [request.headers.get(OBJECTIVE_HEADER) for request in requests]
    urgent = objectives.count("urgent")
    assert 250 < urgent < 350
    assert urgent + objectives.count(None) == 1000
    client = Client("http://nowhere")
    client.answers = {str(number): answer(number) for number in range(1000)}
    records = [record(*pair) for pair in zip(planned, client.answers.values(), strict=True)]
    figures = summary(records, client, IDLE, 5.0)
    assert figures["objectives"]["urgent"]["requests"] == urgent
    assert "urgent" in table(figures)


def test_figures_are_those_of_complete_answers() -> None:
    answers = [answer(n, problem="connect" if n in (1, 3) else "") for n in range(5)]
    answers[0].gaps_s.extend([0.25, 0.5])
    answers[1].gaps_s.append(9.0)
    figures = summed(*answers, excluded=7)
    assert (figures["requests"], figures["answered"], figures["failed"]) == (5, 3, 2)
    assert figures["errors"] == {"connect": 2}
    means = [figures[name]["mean"] for name in ("ttft_s", "gap_s")]
    rates = [figures[f"{name}_per_s"] for name in ("requests", "output_tokens")]
    assert means + rates == pytest.approx([0.2, 0.375, 3 / 5, 30 / 5])
    assert figures["prompt_tokens"] == {"planned": 300, "counted": 300}
    a, b = (figures["replicas"][name] for name in "ab")
    assert (a["requests"], a["failed"], b["requests"], b["failed"]) == (2, 2, 3, 0)
    assert a["ttft_s"] is None
    assert figures["warnings"] == []
    text = table(figures)
    for shown in ("3 of 5 requests answered", "failed: 2 × connect", "for the context: 7 requests"):
        assert shown in text
    nothing = summed(answer(1, problem="timeout"))
    assert nothing["ttft_s"] is nothing["completion_s"] is nothing["gap_s"] is None
    assert "0 of 1 requests answered" in table(nothing)


@pytest.mark.parametrize(
    ("answers", "effort", "warning"),
    [
        ([answer(1), answer(2, late_s=0.5)], IDLE, "ms late at p99"),
        ([answer(1)], Effort(1.0, 0.95), "95% of a core"),
        ([answer(1, generated=16)], IDLE, "output tokens are 160% of the trace's"),
    ],
)
def test_doubtful_figures_have_a_warning(
    answers: list[Answer], effort: Effort, warning: str
) -> None:
    figures = summed(*answers, effort=effort)
    (text,) = figures["warnings"]
    assert warning in text
    assert f"WARNING: {text}" in table(figures)


def complaint(capsys: pytest.CaptureFixture[str], *given: str | Path) -> str:
    return complaint_of(
        main, capsys, "--url", "http://127.0.0.1:9", "--trace", CONVERSATION, *given
    )


def test_part_without_requests_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 9000, "input_length": 5, "output_length": 3}\n')
    assert "first 2 s" in complaint(capsys, "--trace", trace, "--duration", "2")
    line = complaint(capsys, "--trace", trace, "--from", "3", "--duration", "6")
    assert "first 6 s from 3 s on" in line
    assert "from 10 s on" in complaint(capsys, "--trace", trace, "--from", "10")


def test_unreachable_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert complaint(capsys, "--url", url).startswith(f"load: {url} cannot be reached: ")


@pytest.fixture(scope="module")
def replica() -> Iterator[str]:
    command = [sys.executable, "-m", "extproc", "simulate", "--port", "0", "--speed", "20"]
    with Popen(command, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


@pytest.mark.process
def test_load_on_a_replica(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, replica: str
) -> None:
    path = tmp_path / "load.json"
    given = ["--url", f"{replica}/v1", "--trace", str(CONVERSATION), "--speed", "50"]
    options = ["--requests", "40", "--stream-share", "0.5", "--policy-header", "round_robin"]
    page = tmp_path / "report"
    assert main([*given, *options, "--json", str(path), "--report", str(page)]) == 0
    output = capsys.readouterr()
    assert (page / "report.md").is_file()
    assert "40 of 40 requests answered" in output.out
    assert output.err == ""
    result = json.loads(path.read_text())
    assert result["run"]["name"] == result["run"]["policy"] == "round_robin"
    assert result["summary"]["output_tokens"]["planned"] > 1000
    for tokens in ("prompt_tokens", "output_tokens"):
        counts = result["summary"][tokens]
        assert counts["counted"] == counts["planned"]
    assert [*result["summary"]["replicas"]] == [replica.removeprefix("http://")]
    assert 5 < sum(request["streamed"] for request in result["requests"]) < 35
    assert {request["endpoint"] for request in result["requests"]} == {"chat", "completions"}
    hits = [cached_tokens(replica)]
    for _ in range(2):
        assert main([*given, *options, "--seed", "1"]) == 0
        hits.append(cached_tokens(replica))
    assert hits[2] - hits[1] > 10 * (hits[1] - hits[0]), "a seed alone repeats prompts"


def cached_tokens(replica: str) -> float:
    samples = samples_of(asyncio.run(get_text(f"{replica}/metrics")) or "")
    return next(each.value for each in samples if each.name == "vllm:prefix_cache_hits_total")


@pytest.mark.process
def test_timeout_of_a_request_fails_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, replica: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 50, "output_length": 5, "max_tokens": 16}
    trace.write_text(json.dumps(line) + "\n" + json.dumps(line | {"output_length": 30_000}))
    given = ["--url", replica, "--trace", str(trace), "--known-lengths", "--timeout", "4"]
    assert main(given) == 1
    output = capsys.readouterr().out
    assert "1 of 2 requests answered" in output
    assert "failed: 1 × timeout" in output
