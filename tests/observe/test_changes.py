"""Changes of replicas, processes, counters and warnings are logged once, each with its time."""

import logging
from typing import Any

import pytest

from extproc.ground.clock import time_of_day
from extproc.observe.changes import CounterLog, Exclusions, Onsets, Presence, WarningLog
from extproc.observe.metrics import Counts
from tests.conftest import Logged
from tests.fakes import A10, ManualClock, fleet_of, replica, state

LEFT_AT = 1001.0
A_LEFT = f"a (since {time_of_day(LEFT_AT)})"


def test_growth_of_a_counter_is_logged_at_once_and_then_every_minute(
    clock: ManualClock, logged: Logged
) -> None:
    refused = Counts("a", "A.", ["reason"], registry=None)
    log = CounterLog(
        logging.getLogger("extproc.tests"), "requests refused", refused, clock, {"invalid_json"}
    )
    for _ in range(180):
        for reason in ("saturated", "saturated", "too_late", "invalid_json"):
            refused.add(reason)
        log.look()
        clock.advance(1.0)
    lines = logged.lines("requests refused")
    assert [line["saturated"] for line in lines] == [2, 120, 120]
    assert [line["too_late"] for line in lines] == [1, 60, 60]
    assert all("invalid_json" not in line for line in lines)
    clock.advance(60.0)
    log.look()
    log.look()
    assert len(logged.lines()) == 4  # the rest of the last minute, and nothing after it


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


def test_cause_lasts_since_it_was_first_seen(clock: ManualClock) -> None:
    onsets, first = Onsets(clock), time_of_day(clock())
    for _ in range(3):
        assert onsets.since("slow", ["r1"]) == f"since {first}"
        clock.advance(30.0)
    assert onsets.since("slow", ["r2", "r1"]) == f"the first since {first}"
    second = time_of_day(clock())
    clock.advance(1.0)
    assert onsets.since("slow", ["r2"]) == f"since {second}"
    assert onsets.since("frozen", ["r1"]) == f"since {time_of_day(clock())}"


def test_cause_unseen_for_a_minute_begins_anew(clock: ManualClock) -> None:
    onsets, first = Onsets(clock), time_of_day(clock())
    assert onsets.since("slow", ["r1"]) == f"since {first}"
    clock.advance(60.0)
    assert onsets.since("slow", ["r1"]) == f"since {first}"
    clock.advance(60.5)
    assert onsets.since("slow", ["r1"]) == f"since {time_of_day(clock())}"


def test_process_that_left_is_shown_for_ten_minutes(logged: Logged) -> None:
    pollers = Presence("pollers", "batch")
    pollers.look({"a", "b"}, 1000.0, ())
    assert pollers.gone == ""
    pollers.look({"b", "c"}, LEFT_AT, ())
    pollers.look({"b", "c"}, 1600.0, ())
    assert pollers.gone == A_LEFT
    pollers.look({"b", "c"}, 1601.0, ())
    assert pollers.gone == ""
    (line,) = logged.lines()
    assert (line["msg"], line["pool"]) == ("pollers joined or left the pool", "batch")
    assert (line["joined"], line["left"]) == ("c", "a")


def test_process_that_returns_is_no_longer_gone(logged: Logged) -> None:
    routers = Presence("routers", "batch")
    for alive in ({"a"}, set[str](), {"a"}):
        routers.look(alive, 1000.0, ())
    assert routers.gone == ""
    assert [(line["joined"], line["left"]) for line in logged.lines()] == [("", "a"), ("a", "")]


@pytest.mark.parametrize(
    ("lost_at", "alive", "stopped"),
    [
        pytest.param(1003.0, {"a"}, set[str](), id="it returns"),
        pytest.param(1003.0, set[str](), {"a:1"}, id="it hung and then says farewell"),
        pytest.param(1600.0, set[str](), set[str](), id="ten minutes have passed"),
    ],
)
def test_lost_process_is_named_until(lost_at: float, alive: set[str], stopped: set[str]) -> None:
    routers = Presence("routers", "batch")
    for now, seen in ((1000.0, {"a"}), (LEFT_AT, set[str]()), (lost_at, set[str]())):
        routers.look(seen, now, ())
    assert routers.lost == [A_LEFT]
    routers.look(alive, lost_at + 1.0, stopped)
    assert routers.lost == []


def test_farewell_of_the_process_before_does_not_hide_a_loss() -> None:
    pollers = Presence("pollers", "batch")
    for alive, stopped in (({"a"}, ()), ({"a"}, {"a:1"}), ((), {"a:1"})):
        pollers.look(alive, 1000.0, stopped)
    assert len(pollers.lost) == 1
    pollers.look({"a"}, 1001.0, {"a:1"})
    pollers.look((), 1002.0, {"a:1", "a:2"})
    assert pollers.lost == []


def test_warning_is_logged_when_it_appears_and_when_it_is_over(
    clock: ManualClock, logged: Logged
) -> None:
    log = WarningLog(clock)
    for warnings in (["r1 is slow"], [], ["r1 is slow"], []):
        log.look(warnings)
        clock.advance(50.0)
    log.look([])
    begin, end = logged.lines()
    assert (begin["levelname"], begin["msg"]) == ("WARNING", "dashboard warning: r1 is slow")
    assert (end["levelname"], end["msg"]) == ("INFO", "dashboard warning ended: r1 is slow")
