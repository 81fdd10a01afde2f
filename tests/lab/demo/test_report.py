"""Output of the demo: the reason of each request, and the figures of ``--once``."""

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from extproc.lab.demo import journal
from extproc.lab.demo.journal import Entry
from extproc.lab.demo.report import Report, Run
from extproc.lab.harness.envoy_config import Access, AccessLog
from extproc.lab.harness.samples import samples
from extproc.lab.harness.traffic import Answer
from extproc.observe.decision import DecisionRecord

LOGGED = {
    "request_id": "one",
    "method": "POST",
    "path": "/v1/completions",
    "status": 200,
    "upstream": "10.0.0.1:80",
    "destination": "10.0.0.1:80",
    "flags": None,
    "duration_ms": 500,
    "request_header_latency_us": 400,
    "request_body_total_latency_us": 1600,
}
NAMES = {"10.0.0.1:80": "fast", "10.0.0.2:80": "slow", "10.0.0.3:80": "idle"}
WHY = (
    "fast-2 finishes it in 0.62 s, fast-1 in 0.61 s: as good as equal, and here the first token "
    "comes 12.3 ms sooner, after 45.6 ms; slow-1 in 3.50 s though it is idle"
)


def decision_record(
    request_id: str, predicted_s: float, replica: str, second: str
) -> DecisionRecord:
    fields: dict[str, Any] = dict.fromkeys(DecisionRecord.__struct_fields__)
    fields |= {"number": 1, "request_id": request_id, "prompt_tokens": 12_345, "why": WHY}
    fields |= {"replica": replica, "second": second, "predicted_completion_s": predicted_s}
    return DecisionRecord(**fields)


def run(*served: tuple[str, float, bool], seconds: float = 2.0) -> Run:
    """Return a run of requests, each given as upstream, predicted seconds, and True if decided."""
    answers, entries = [], []
    for number, (upstream, predicted, decided) in enumerate(served):
        name = str(number)
        decision = decision_record(name, predicted, "10.0.0.1:80", "10.0.0.2:80")
        access = Access(name, 200, upstream, 1.0, 2.0)
        answers.append(Answer(name, None, seconds))
        entries.append(Entry(access, decision if decided else None))
    return Run(answers, entries, NAMES)


FIRST = ("10.0.0.1:80", 3.0, True)
SECOND = ("10.0.0.2:80", 1.0, True)


def test_first_and_second_choice_count_as_routed() -> None:
    report = Report(1.5, run(FIRST, SECOND, FIRST), run(FIRST, seconds=6.0))
    figures = report.to_json()
    assert report.failure == ""
    assert (figures["requests"], figures["routed"], figures["fallback"]) == (3, 3, 0)
    assert figures["per_replica"] == {"fast": 2, "slow": 1, "idle": 0}
    assert figures["predicted_error_median"] == pytest.approx(0.5)
    assert figures["added_ms_p50"] == pytest.approx(2.0)
    assert figures["p99_ratio"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("served", "reason"),
    [
        (("10.0.0.1:80", 3.0, False), "Envoy's fallback served 1 of 2 requests"),
        (("10.0.0.3:80", 3.0, True), "1 of 2 requests were not routed"),
    ],
)
def test_request_on_an_unchosen_replica_is_a_failure(
    served: tuple[str, float, bool], reason: str
) -> None:
    assert Report(1.0, run(FIRST, served), run(FIRST)).failure.endswith(reason)
    assert Report(1.0, run(FIRST), run(FIRST, served)).failure.startswith("under round_robin")


def test_incomplete_answer_is_a_failure_with_its_reason() -> None:
    failed = run(FIRST)
    failed.answers.append(Answer("x", None, 1.0, "status 503: overloaded"))
    failure = Report(1.0, failed, run(FIRST)).failure
    assert failure == "under the default policy, 1 of 2 requests failed: status 503: overloaded"


def test_figures_without_answers_are_null() -> None:
    figures = Report(1.0, run(), run()).to_json()
    assert figures["completion_s"] == {"p50": None, "p99": None}
    assert figures["predicted_error_median"] is None
    assert figures["p99_ratio"] is None


def test_equal_seeds_give_equal_samples_with_different_prompts() -> None:
    first, again = (list(islice(samples("m", 5.0, Random(3)), 50)) for _ in range(2))
    assert first == again
    assert {sample.kind for sample in first} == {"chat", "document", "essay"}
    assert {sample.stream for sample in first} == {True, False}
    bodies = [sample.body(name) for sample in first for name in ("one", "two")]
    prompts = [body.get("prompt") or body["messages"][0]["content"] for body in bodies]
    assert len(set(prompts)) == 100


@pytest.mark.parametrize(
    ("decided", "status", "why"),
    [
        (True, 200, WHY.partition(";")[0]),
        (False, 200, "no decision: Envoy's fallback"),
        (True, 503, "status 503"),
        (True, 0, "the client left"),
    ],
)
def test_ended_request_has_a_reason(decided: bool, status: int, why: str) -> None:
    decision = decision_record("one", 12.34, "10.0.0.1:80", "10.0.0.2:80") if decided else None
    assert Entry(Access("one", status, "10.0.0.1:80", 1.0, 2.0), decision).why == why


@pytest.mark.parametrize(
    ("headers_us", "body_us", "added_ms"),
    [
        (400, 1600, 2.0),
        ("-", 1600, 1.6),  # headers and body in one message
        (400, "-", None),  # the router died after the headers
        (None, None, None),
    ],
)
def test_access_log_has_the_time_added_by_the_router(
    tmp_path: Path, headers_us: object, body_us: object, added_ms: float | None
) -> None:
    latencies = {"request_header_latency_us": headers_us, "request_body_total_latency_us": body_us}
    record = LOGGED | latencies
    file = tmp_path / "access.log"
    file.write_text(f"{json.dumps(record)}\n{json.dumps(record | {'method': 'GET'})}\nhalf a l")
    log = AccessLog(file)
    (access,) = log.new()
    assert access.added_ms == added_ms
    assert access.duration_s == 0.5
    assert log.new() == []


async def test_only_second_failed_read_leaves_logged_request_without_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[object] = []
    monkeypatch.setattr(journal, "get_json", AsyncMock(side_effect=lambda _: pages.pop(0)))
    stack = Mock(access_log=tmp_path / "access.log", router_admin="http://router")
    demo = journal.Journal(stack)
    reads: dict[str, list[object]] = {
        "before": [[{"number": 1, "request_id": "before"}], []],
        "failed read": [None, [{"number": 2, "request_id": "failed read"}], []],
        "router down": [None, None],
    }
    for name, pages[:] in reads.items():
        with stack.access_log.open("a") as log:
            log.write(f"{json.dumps(LOGGED | {'request_id': name})}\n")
        (entry,) = await demo.settle([name])
        assert (entry.fallback, pages) == (name == "router down", [])
