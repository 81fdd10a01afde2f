"""Exclusions of replicas, their reasons and their ends are logged once."""

from typing import Any

import pytest

from extproc.observe.changes import Exclusions
from tests.conftest import Logged
from tests.fakes import ManualClock, fleet_of, replica, state

A10 = "llama-8b-a10"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"healthy": False, "problem": "cannot connect"}, "unhealthy"),
        ({"unanswered_s": 2.0}, "stalled"),
        ({"asleep": True}, "asleep"),
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
    assert begin["msg"] == f"replica {replica(1)} excluded: {reason}"
    assert (begin["levelname"], end["levelname"]) == ("WARNING", "INFO")
    assert end["msg"] == f"replica {replica(1)} is used again after 3 s"
    assert begin.get("problem", "") == figures.get("problem", "")


def test_removed_replica_is_not_logged_as_used_again(clock: ManualClock, logged: Logged) -> None:
    fleet, exclusions = fleet_of(clock, A10, A10), Exclusions()
    fleet.put(state(1, A10, clock, healthy=False))
    exclusions.look(fleet, clock())
    fleet.remove(replica(1))
    exclusions.look(fleet, clock())
    assert len(logged.lines()) == 1
