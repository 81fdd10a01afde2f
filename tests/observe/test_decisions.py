import random
from dataclasses import replace

import numpy as np
import pytest
from msgspec import to_builtins
from msgspec.json import decode, encode

from extproc.observe.decision_log import DecisionLog, LoggedDecision
from extproc.predict.inputs import Excluded
from extproc.route import overrides
from extproc.route.decision import Choice, Decision, Situation
from extproc.route.policies import POLICIES
from extproc.route.router import Router
from tests.fakes import ManualClock, chat, fleet_of, replica


def decision(policy: str = "completion", replicas: int = 3) -> Decision:
    fleet = fleet_of(ManualClock(), *["llama-8b-a10"] * replicas)
    made = Router(fleet, policy, random.Random(1)).decide(chat(100, 50))
    assert made is not None
    return made


def kept(made: Decision) -> LoggedDecision:
    return DecisionLog(10).add("id", 1.0, made)


@pytest.mark.parametrize("policy", POLICIES)
def test_record_of_any_policy_is_valid_json(policy: str) -> None:
    shown = decode(encode(kept(decision(policy)).record()))
    assert shown["policy"] == policy
    assert shown["predicted_completion_s"] > shown["predicted_ttft_s"] > 0
    assert {one["replica"] for one in shown["candidates"]} == {replica(n) for n in (1, 2, 3)}
    assert shown["outcome"]["completion_s"] is None


def test_terms_of_a_candidate_add_up() -> None:
    shown = kept(decision()).record()
    finish = shown.predicted_completion_s
    assert shown.why.startswith(f"{shown.replica_name} finishes it in {finish:.2f} s, ")
    for candidate in to_builtins(shown.candidates):
        terms = candidate["terms_s"]
        ttft = terms["step_rest"] + terms["admission"] + terms["prefill"]
        assert candidate["predicted_ttft_s"] == pytest.approx(ttft, abs=1e-4)
        completion = ttft + terms["decode"]
        assert candidate["predicted_completion_s"] == pytest.approx(completion, abs=1e-4)


def test_best_candidates_and_the_chosen_one_are_shown_of_many() -> None:
    made = decision(replicas=40)
    first, worst = 30, 31
    scores = np.arange(40.0)
    scores[worst] = np.inf
    record = kept(replace(made, choice=replace(made.choice, first=first, scores=scores)))
    ids = made.situation.view.ids
    for most, rows in ((5, [*range(5), first]), (None, range(40)), (40, range(40))):
        shown = record.record(most)
        assert [(one.replica, one.score) for one in shown.candidates] == [
            (ids[row], None if row == worst else scores[row]) for row in rows
        ]
        assert shown.compared == 40


def test_words_are_made_only_when_a_record_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Choice] = []

    def why(policy: str, situation: Situation, choice: Choice) -> str:
        shown.append(choice)
        return "because"

    monkeypatch.setattr(overrides, "why", why)
    record = kept(decision())
    assert shown == []
    assert record.record().why == "because"


def test_replicas_left_out_are_in_the_record() -> None:
    made = decision()
    left_out = Excluded(replica(4), "r4", "no answer to the last poll")
    made.situation.view.excluded = (left_out,)
    assert to_builtins(kept(made).record().excluded) == [
        {"replica": replica(4), "name": "r4", "why": "no answer to the last poll"}
    ]
    assert kept(made).record(0).excluded == []


def test_last_records_are_kept() -> None:
    log, none = DecisionLog(3), DecisionLog(0)
    for number in range(5):
        log.add(f"request-{number}", 1.0, decision())
        none.add("id", 1.0, decision())
    assert [record.number for record in log.after(0)] == [3, 4, 5]
    assert [record.number for record in log.after(4)] == [5]
    assert log.of_request("request-1") == []
    assert [record.number for record in log.of_request("request-4")] == [5]
    assert none.after(0) == []


def test_large_fleet_does_not_fill_the_memory() -> None:
    log, large = DecisionLog(100_000), decision(replicas=200)
    for _ in range(600):
        log.add("id", 1.0, large)
    assert len(log.after(0)) == 500
