"""The figures of ``extproc demo --once``."""

from itertools import islice
from random import Random

import pytest

from extproc.lab.demo.journal import Entry
from extproc.lab.demo.report import Report, Run
from extproc.lab.harness.envoy_config import Access
from extproc.lab.harness.samples import samples
from extproc.lab.harness.traffic import Answer
from tests.lab.demo.decision import decision_record

NAMES = {"10.0.0.1:80": "fast", "10.0.0.2:80": "slow", "10.0.0.3:80": "idle"}


def access(request_id: str, upstream: str, added_ms: float | None = 2.0) -> Access:
    return Access(request_id, 200, upstream, 1.0, added_ms)


def run(*served: tuple[str, float, bool], seconds: float = 2.0) -> Run:
    """A run of (upstream, predicted seconds, whether there was a decision)."""
    entries = {}
    for number, (upstream, predicted, decided) in enumerate(served):
        name = str(number)
        decision = decision_record(name, "10.0.0.1:80", "10.0.0.2:80", predicted)
        entries[name] = Entry(name, 0.0, decision if decided else None)
        entries[name].access = access(name, upstream)
    answers = [Answer(name, None, seconds) for name in entries]
    return Run(answers, entries, NAMES)


FIRST = ("10.0.0.1:80", 3.0, True)
SECOND = ("10.0.0.2:80", 1.0, True)


def test_both_choices_of_the_router_count_as_routed() -> None:
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
def test_a_request_served_elsewhere_is_a_failure(
    served: tuple[str, float, bool], reason: str
) -> None:
    assert Report(1.0, run(FIRST, served), run(FIRST)).failure.endswith(reason)
    assert Report(1.0, run(FIRST), run(FIRST, served)).failure.startswith("under round_robin")


def test_a_request_without_a_whole_answer_is_a_failure_with_its_reason() -> None:
    failed = run(FIRST)
    failed.answers.append(Answer("x", None, 1.0, "status 503: overloaded"))
    failure = Report(1.0, failed, run(FIRST)).failure
    assert failure == "under the default policy, 1 of 2 requests failed: status 503: overloaded"


def test_figures_of_no_answers_are_null() -> None:
    figures = Report(1.0, run(), run()).to_json()
    assert figures["completion_s"] == {"p50": None, "p99": None}
    assert figures["predicted_error_median"] is None
    assert figures["p99_ratio"] is None


def test_the_same_seed_sends_the_same_requests_with_prompts_of_their_own() -> None:
    first, again = (list(islice(samples("m", 5.0, Random(3)), 50)) for _ in range(2))
    assert first == again
    assert {sample.kind for sample in first} == {"chat", "document", "essay"}
    assert {sample.stream for sample in first} == {True, False}
    bodies = [sample.body(name) for sample in first for name in ("one", "two")]
    prompts = [body.get("prompt") or body["messages"][0]["content"] for body in bodies]
    assert len(set(prompts)) == 100
