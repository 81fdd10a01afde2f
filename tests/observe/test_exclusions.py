"""Exclusions of replicas, their reasons and their ends are logged once."""

from typing import Any

import pytest

from extproc.ground.clock import time_of_day
from extproc.observe.changes import Exclusions
from tests.conftest import Logged
from tests.fakes import ManualClock, fleet_of, replica, state

A10 = "llama-8b-a10"


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"healthy": False, "problem": "cannot connect"}, "unhealthy"),
        ({"healthy": False, "problem": "cannot connect", "asleep": True}, "unhealthy"),
        ({"unanswered_s": 2.0}, "stalled"),
        ({"unanswered_s": 9.0, "healthy": False, "problem": "hangs"}, "stalled"),
        ({"asleep": True}, "asleep"),
        ({"ready": False, "problem": "not ready, says Kubernetes"}, "not ready"),
    ],
)
def test_exclusion_and_its_end_are_logged_once(
    clock: ManualClock, logged: Logged, figures: dict[str, Any], reason: str
) -> None:
    fleet, exclusions = fleet_of(clock, A10, A10), Exclusions()
    for broken in (False, True, True, True, False, False):
        fleet.put(state(1, A10, clock, **figures if broken else {}))
        exclusions.look(fleet, clock())
        clock.advance(1.0)
    begin, end = logged.lines()
    assert begin["msg"] == f"replica r1 ({replica(1)}) excluded: {reason}"
    assert (begin["levelname"], end["levelname"]) == ("WARNING", "INFO")
    assert end["msg"] == f"replica r1 ({replica(1)}) is used again after 3 s"
    assert begin.get("problem", "") == figures.get("problem", "")


def test_replica_is_excluded_since_its_first_reason(clock: ManualClock, logged: Logged) -> None:
    fleet, exclusions = fleet_of(clock, A10, A10), Exclusions()
    since = time_of_day(clock())
    for figures in ({"unanswered_s": 2.0}, {"healthy": False}):
        fleet.put(state(1, A10, clock, **figures))
        exclusions.look(fleet, clock())
        assert exclusions.since([replica(1)]) == f"since {since}"
        clock.advance(2.0)
    fleet.put(state(1, A10, clock))
    exclusions.look(fleet, clock())
    assert [line["msg"] for line in logged.lines()] == [
        f"replica r1 ({replica(1)}) excluded: stalled",
        f"replica r1 ({replica(1)}) excluded: unhealthy",
        f"replica r1 ({replica(1)}) is used again after 4 s",
    ]


def test_removed_replica_is_not_logged_as_used_again(clock: ManualClock, logged: Logged) -> None:
    fleet, exclusions = fleet_of(clock, A10, A10), Exclusions()
    fleet.put(state(1, A10, clock, healthy=False))
    exclusions.look(fleet, clock())
    fleet.remove(replica(1))
    exclusions.look(fleet, clock())
    assert len(logged.lines()) == 1
