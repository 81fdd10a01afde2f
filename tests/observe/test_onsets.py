"""Onsets remember since when a cause lasts, through short interruptions."""

from extproc.ground.clock import time_of_day
from extproc.observe.changes import Onsets
from tests.fakes import ManualClock


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
