"""Decision records have all candidates and terms; the log of decisions is bounded."""

import dataclasses
import random

import numpy as np
import pytest
from msgspec.json import decode, encode
from msgspec.structs import replace

from extproc.observe.decision_log import DecisionLog, LoggedDecision
from extproc.predict.inputs import Excluded
from extproc.request.prefix import NO_PREFIX
from extproc.route import overrides
from extproc.route.decision import Choice, Decision, Situation
from extproc.route.policies import POLICIES
from extproc.route.router import Router
from tests.fakes import A10, ManualClock, chat, decided, fleet_of, replica


def decision(policy: str = "completion", replicas: int = 3) -> Decision:
    fleet = fleet_of(ManualClock(), *[A10] * replicas)
    return decided(Router(fleet, policy, random.Random(1)), chat(100, 50))


def logged(made: Decision) -> LoggedDecision:
    return DecisionLog(10).add("id", 1.0, made)


@pytest.mark.parametrize("policy", POLICIES)
def test_record_of_any_policy_is_valid_json(policy: str) -> None:
    record = decode(encode(logged(decision(policy)).record()))
    assert record["policy"] == policy
    assert record["predicted_completion_s"] > record["predicted_ttft_s"] > 0
    assert {candidate["replica"] for candidate in record["candidates"]} == {
        replica(n) for n in (1, 2, 3)
    }
    assert record["outcome"]["completion_s"] is None


def test_best_candidates_and_the_chosen_replica_are_shown_of_many() -> None:
    made = decision(replicas=40)
    first, worst = 30, 31
    scores = np.arange(40.0)
    scores[worst] = np.inf
    ids = made.situation.view.ids
    choice = replace(made.choice, first=first, scores=scores)
    entry = logged(replace(made, choice=choice))
    made.situation.view.excluded = (Excluded(replica(41), "r41", "draining"),) * 10
    for most, rows in ((5, [*range(5), first]), (None, range(40)), (40, range(40))):
        record = entry.record(most)
        assert [(candidate.replica, candidate.score) for candidate in record.candidates] == [
            (ids[row], None if row == worst else scores[row]) for row in rows
        ]
        assert record.compared == 40
        assert len(record.excluded) == min(most or 10, 10)


def test_reason_is_worded_only_when_a_record_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    worded: list[Choice] = []

    def why(policy: str, situation: Situation, choice: Choice) -> str:
        worded.append(choice)
        return "because"

    monkeypatch.setattr(overrides, "why", why)
    entry = logged(decision())
    assert worded == []
    assert entry.record().why == "because"


def test_log_drops_the_oldest_decisions() -> None:
    log, none = DecisionLog(3), DecisionLog(0)
    for number in range(5):
        log.add(f"request-{number}", 1.0, decision())
        none.add("id", 1.0, decision())
    assert [record.number for record in log.after(0)] == [3, 4, 5]
    assert [record.number for record in log.after(4)] == [5]
    assert log.of_request("request-1") == []
    assert [record.number for record in log.of_request("request-4")] == [5]
    assert none.after(0) == []


def test_decisions_of_a_large_fleet_do_not_fill_the_memory() -> None:
    log, large = DecisionLog(100_000), decision(replicas=200)
    for _ in range(600):
        log.add("id", 1.0, large)
    assert len(log.after(0)) == 500


def test_decision_keeps_no_token_ids_and_sequences_after_the_dispatch() -> None:
    fleet = fleet_of(ManualClock(), A10)
    fleet.dispatch(replica(1), chat(100, 50))
    prefix = dataclasses.replace(NO_PREFIX, ids=np.arange(5_000, dtype=np.uint32))
    profile = dataclasses.replace(chat(5_000, 50), prefix=prefix)
    made = decided(Router(fleet, "completion", random.Random(1)), profile)
    assert len(made.profile.prefix.ids) == 5_000
    assert len(made.situation.sequences.replica) == 1
    made.drop_large_parts()
    assert len(made.profile.prefix.ids) == len(made.situation.sequences.replica) == 0
    assert logged(made).record().prompt_tokens == 5_000
