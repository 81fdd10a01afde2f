"""A counter that grows is logged at once, then once a minute."""

import logging

from extproc.observe.changes import CounterLog
from extproc.observe.metrics import Counts
from tests.conftest import Logged
from tests.fakes import ManualClock

logger = logging.getLogger("extproc.tests")


def test_growth_is_logged_at_once_and_then_every_minute(logged: Logged) -> None:
    clock, refused = ManualClock(1000.0), Counts("a", "A.", ["reason"], registry=None)
    log = CounterLog(logger, "requests refused", refused, clock, {"invalid_json"})
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
