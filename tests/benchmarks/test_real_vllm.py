"""``benchmarks.real_vllm``: accuracy of predictions, its requests, and a whole run."""

import asyncio
import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.real_vllm import accuracy, join, main, measures, requests
from extproc.lab.harness.traffic import Answer
from tests.benchmarks.conftest import simulated


def served(ttft_s: float | None = None, completion_s: float = 2.0) -> dict[str, Any]:
    predicted = {"predicted_ttft_s": 0.5, "predicted_completion_s": 2.2}
    return {"ttft_s": ttft_s, "completion_s": completion_s, **predicted}


def test_accuracy_has_relative_errors_and_rank_correlation() -> None:
    found = accuracy([1.0, 3.0, 1.0], [2.0, 2.0, 1.0]) or {}
    assert (found["requests"], found["median_bias"]) == (3, 0.0)
    assert found["median_error"] == found["p90_error"] == pytest.approx(0.5)
    right = accuracy([1.0, 20.0, 300.0], [1.0, 2.0, 3.0]) or {}
    wrong = accuracy([3.0, 2.0, 1.0], [1.0, 20.0, 300.0]) or {}
    assert right["rank_correlation"] == pytest.approx(1.0)
    assert wrong["rank_correlation"] == pytest.approx(-1.0)
    assert accuracy([1.0], [1.0]) is None


def test_first_tokens_are_those_of_streams() -> None:
    found = measures([served(ttft_s=1.0), served(ttft_s=0.5), served(completion_s=1.1)])
    completion, ttft, decode = (found[name] or {} for name in ("completion", "ttft", "decode"))
    assert [found["requests"] for found in (completion, ttft, decode)] == [3, 2, 2]
    assert ttft["median_bias"] == pytest.approx(-0.25)
    assert decode["median_bias"] == pytest.approx((1.7 / 1.0 + 1.7 / 1.5) / 2 - 1)


def test_only_routed_and_answered_requests_count() -> None:
    sent = list(islice(requests("m", 1.0, Random(0)), 3))
    answered = [
        Answer("r-1", 0.4, 2.0),
        Answer("r-2", None, 0.1, "status 503: busy"),
        Answer("r-3", None, 1.0),
    ]
    predicted = {"predicted_ttft_s": 0.3, "predicted_completion_s": 1.5}
    record = {"replica_name": "a", "prompt_tokens": 7, "expected_output_tokens": 9.0} | predicted
    records = [record | {"request_id": f"r-{number}"} for number in (2, 1)]
    (row,) = join(sent, answered, records)
    assert (row["request_id"], row["ttft_s"], row["completion_s"]) == ("r-1", 0.4, 2.0)
    assert {key: row[key] for key in predicted} == predicted
    assert row["known"] is (sent[0].kind == "known")


def test_requests_are_mixed_and_bound_if_known() -> None:
    sent = list(islice(requests("m", 4.0, Random(1)), 2000))
    assert sent[-1].at_s == pytest.approx(500, rel=0.1)
    assert len({(sample.path, sample.stream, sample.kind) for sample in sent}) == 8
    for sample in sent:
        body, known = sample.body("run"), sample.kind == "known"
        assert body.get("ignore_eos", False) is known
        assert (body["max_tokens"] == sample.output_tokens) is known
        assert body["max_tokens"] >= sample.output_tokens


@pytest.mark.process
async def test_policies_are_measured_on_simulated_servers(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["--model", "m", "--policy", "completion,round_robin", "--json", str(report)]
    arguments += ["--requests", "10", "--warm-up", "4", "--rate", "10"]
    async with simulated(model="m") as (_, first), simulated(model="m") as (_, second):
        assert await asyncio.to_thread(main, [first, second, *arguments]) == 0
    warm_up, completion, round_robin = json.loads(report.read_text())
    assert warm_up["sent"] == 4
    assert completion["policy"] == "completion"
    assert round_robin["policy"] == "round_robin"
    assert len(completion["served"]) == len(round_robin["served"]) == 10
    assert {row["replica"] for row in round_robin["served"]} == {"vllm-1", "vllm-2"}
    assert set(completion["learned"]) == {"vllm-1", "vllm-2"}
    assert completion["accuracy"]["all"]["completion"]["requests"] == 10
