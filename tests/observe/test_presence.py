"""Routers and pollers that left or are lost: the time when each left is shown and logged."""

from datetime import datetime

import pytest

from extproc.observe.changes import Presence, WarningLog
from extproc.observe.history import Average
from tests.conftest import Logged
from tests.fakes import ManualClock


def test_process_that_left_is_shown_for_ten_minutes(logged: Logged) -> None:
    pollers = Presence("pollers", "batch")
    pollers.look({"a", "b"}, 1000.0, ())
    assert pollers.gone == ""
    pollers.look({"b", "c"}, 1001.0, ())
    pollers.look({"b", "c"}, 1600.0, ())
    assert pollers.gone == f"a (since {datetime.fromtimestamp(1001):%H:%M:%S})"
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
    ("lost_at", "end", "alive", "stopped"),
    [(1003.0, 1004.0, {"a"}, set[str]()), (1003.0, 1004.0, set[str](), {"a:1"}),
     (1600.0, 1601.0, set[str](), set[str]())],
    ids=["it returns", "it hung and then says farewell", "ten minutes have passed"],
)  # fmt: skip
def test_lost_process_is_named_until(
    lost_at: float, end: float, alive: set[str], stopped: set[str]
) -> None:
    routers = Presence("routers", "batch")
    for now, seen in ((1000.0, {"a"}), (1001.0, set[str]()), (lost_at, set[str]())):
        routers.look(seen, now, ())
    assert routers.lost == [f"a (since {datetime.fromtimestamp(1001):%H:%M:%S})"]
    routers.look(alive, end, stopped)
    assert routers.lost == []


def test_farewell_of_the_process_before_does_not_hide_a_loss() -> None:
    pollers = Presence("pollers", "batch")
    for alive, stopped in (({"a"}, ()), ({"a"}, {"a:1"}), ((), {"a:1"})):
        pollers.look(alive, 1000.0, stopped)
    assert len(pollers.lost) == 1
    pollers.look({"a"}, 1001.0, {"a:1"})
    pollers.look((), 1002.0, {"a:1", "a:2"})
    assert pollers.lost == []


def test_warning_is_logged_when_it_appears_and_when_it_is_over(logged: Logged) -> None:
    clock = ManualClock(0.0)
    log = WarningLog(clock)
    for warnings in (["r1 is slow"], [], ["r1 is slow"], []):
        log.look(warnings)
        clock.advance(50.0)
    log.look([])
    begin, end = logged.lines()
    assert (begin["levelname"], begin["msg"]) == ("WARNING", "dashboard warning: r1 is slow")
    assert (end["levelname"], end["msg"]) == ("INFO", "dashboard warning ended: r1 is slow")


def test_average_weighs_values_by_their_time() -> None:
    clock = ManualClock(0.0)
    average = Average(clock)
    for seconds, value in ((1.0, 1.0),) * 300 + ((0.001, 100.0),):
        clock.advance(seconds)
        average.add(value)
    assert 1.0 < average.value < 1.01


def test_average_forgets_nothing_while_the_process_stands_still() -> None:
    """A router that was stopped for minutes is not slow afterwards."""
    clock = ManualClock(0.0)
    average = Average(clock)
    for seconds, value in ((200.0, 1.0),) + ((1.0, 0.0),) * 40:
        clock.advance(seconds)
        average.add(value)
    assert average.value < 0.02
