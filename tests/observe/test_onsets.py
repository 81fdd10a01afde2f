"""Onsets remember since when a cause lasts, through short interruptions."""

from extproc.observe.changes import Onsets


def test_cause_lasts_since_it_was_first_seen() -> None:
    onsets = Onsets()
    for now in (1000.0, 1030.0, 1060.0):
        assert onsets.since("slow", ["r1"], now) == 1000.0
    assert onsets.since("slow", ["r2", "r1"], 1070.0) == 1000.0
    assert onsets.since("slow", ["r2"], 1071.0) == 1070.0
    assert onsets.since("frozen", ["r1"], 1071.0) == 1071.0


def test_cause_unseen_for_a_minute_begins_anew() -> None:
    onsets = Onsets()
    assert onsets.since("slow", ["r1"], 1000.0) == 1000.0
    assert onsets.since("slow", ["r1"], 1060.0) == 1000.0
    assert onsets.since("slow", ["r1"], 1120.5) == 1120.5
