"""Predictions on replicas that schedule by priority."""

from dataclasses import replace
from math import inf
from random import Random

import numpy as np
import pytest

from extproc.fleet.fleet import Fleet
from extproc.request.objective import Objective
from extproc.request.profile import RequestProfile
from extproc.route.backlog import Backlog
from extproc.route.decision import Decision
from extproc.route.router import Router
from tests.fakes import A10, MODEL, ManualClock, chat, decided, fleet_of, replica, state

CAPACITY = 40_000


def fleet(clock: ManualClock, *by_priority: bool) -> Fleet:
    made = fleet_of(clock)
    for number, does in enumerate(by_priority, start=1):
        figures = {"kv_tokens": CAPACITY, "measured": True}
        made.put(state(number, A10, clock, by_priority=does, **figures))
    return made


def batch_of(prompt: int, bound: int) -> RequestProfile:
    return replace(chat(prompt, bound), objective=Objective(priority=-1))


def decide(fleet: Fleet, prompt: int, priority: int, bound: int = 100) -> Decision:
    profile = replace(chat(prompt, bound), objective=Objective(priority=priority))
    return decided(Router(fleet, "completion", Random(1), backlog=Backlog(0.0)), profile)


def test_request_overtakes_queued_prompts_of_lower_priority(clock: ManualClock) -> None:
    fleet_ = fleet(clock, True, False)
    for number in (1, 2):
        for _ in range(4):
            fleet_.dispatch(replica(number), batch_of(4000, 100))
    clock.advance(0.05)
    alone = decide(fleet(clock, True, False), 1000, 0).prediction.prefill[0]
    prefill = decide(fleet_, 1000, 0).prediction.prefill
    # The first of the prompts is being prefilled.
    assert alone < prefill[0] < 0.5 * prefill[1]
    lower = decide(fleet_, 1000, -1).prediction.prefill
    assert lower[0] == pytest.approx(lower[1])


def test_overtaking_prompt_is_prefilled_first(clock: ManualClock) -> None:
    fleet_ = fleet(clock, True)
    batch = [fleet_.dispatch(replica(1), batch_of(4000, 100)) for _ in range(3)]
    clock.advance(0.05)
    urgent = fleet_.dispatch(replica(1), chat(1000, 100))
    fleet_.first_token(urgent)
    lower, same = (fleet_.view(MODEL, priority=priority).backlog[0] for priority in (-1, 0))
    assert lower == pytest.approx(8000, abs=500), "the first was begun before it came"
    assert same == 0.0
    fleet_.release(urgent)
    for ticket in batch:
        fleet_.first_token(ticket)
        fleet_.release(ticket)
    assert fleet_.view(MODEL, priority=-1).backlog[0] == 0.0


def test_requests_that_are_preempted_first_take_no_kv_tokens(clock: ManualClock) -> None:
    fleet_ = fleet(clock, True, False)
    for number in (1, 2):
        tickets = [fleet_.dispatch(replica(number), batch_of(5000, 2000)) for _ in range(6)]
        for ticket in tickets:
            fleet_.first_token(ticket)
    urgent, batch = decide(fleet_, 1000, 1), decide(fleet_, 1000, -1)
    assert urgent.replica == replica(1)
    pressure = urgent.prediction.kv_pressure
    assert pressure[0] < 0.1 < 0.7 < pressure[1]
    assert urgent.prediction.queue[0] == 0.0
    assert np.ptp(batch.prediction.kv_pressure) == pytest.approx(0.0, abs=0.01)


def test_queued_prompts_of_lower_priority_delay_no_admission(clock: ManualClock) -> None:
    fleet_ = fleet(clock, True)
    for _ in range(12):
        fleet_.dispatch(replica(1), batch_of(4000, 100))
    urgent, lower = (decide(fleet_, 1000, priority).prediction for priority in (1, -1))
    assert urgent.admission[0] == 0.0 < lower.admission[0]


def test_admission_waits_for_kv_tokens_despite_priority(clock: ManualClock) -> None:
    """vLLM preempts for running requests, not for waiting ones."""
    fleet_ = fleet(clock, True)
    for _ in range(7):
        ticket = fleet_.dispatch(replica(1), batch_of(5000, 2000))
        fleet_.first_token(ticket)
    small, large = decide(fleet_, 1000, 1), decide(fleet_, 10_000, 1)
    assert small.prediction.admission[0] == 0.0
    assert small.wait_s == 0.0
    assert 0.0 < large.prediction.admission[0] < inf
    assert large.wait_s > 0.0


def test_external_load_is_not_overtaken(clock: ManualClock) -> None:
    fleet_ = fleet(clock, True)
    figures = {"kv_tokens": CAPACITY, "measured": True, "by_priority": True, "kv_usage": 0.9}
    for steps in (1, 2):
        fleet_.put(state(1, A10, clock, running=6, steps=steps, first_tokens=6, **figures))
    assert decide(fleet_, 1000, 1).prediction.kv_pressure[0] > 0.9
