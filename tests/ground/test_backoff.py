"""Waits between attempts double up to a limit and vary at random."""

from random import Random

from extproc.ground.runtime import Backoff


def test_backoff_doubles_to_its_limit_and_is_cut_by_up_to_half() -> None:
    backoff = Backoff(0.1, 1.0, Random(1))
    waits = [backoff.next() for _ in range(5000)]
    for wait, most in zip(waits, [0.1, 0.2, 0.4, 0.8] + [1.0] * 4996, strict=True):
        assert most / 2 <= wait <= most
    assert len(set(waits)) > 4000
    backoff.reset()
    assert backoff.next() <= 0.1
