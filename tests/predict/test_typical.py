"""What is expected of a replica before anything was measured on it."""

import pytest

from extproc.predict.calibration import Calibration, Typical
from extproc.predict.step import StepModel
from extproc.predict.windows import EngineCounts

START = StepModel(0.01, 1e-4, 1e-4, 1e-7)


class Pool:
    """Replicas that start from one profile and report to one median at every poll."""

    def __init__(self, *ratios: float | None) -> None:
        """By ``ratios`` they were measured to be; None: idle ever since."""
        self._typical = Typical()
        self.replicas = [Calibration(START) for _ in ratios]
        self.ratios = list(ratios)
        self._at = 0.0

    def poll(self, seconds: float, working: bool = True) -> None:
        """One poll a second of all; those that were measured work, or none does."""
        for _ in range(round(seconds)):
            self._at += 1.0
            for number, (one, ratio) in enumerate(zip(self.replicas, self.ratios, strict=True)):
                one.poll(self._counts(ratio if working else None), self._typical.value)
                self._typical.report(str(number), one.ratio)

    def _counts(self, ratio: float | None) -> EngineCounts:
        if ratio is None:
            return EngineCounts(self._at, 1e6, 0.0, 0.0, 0, 0.0)
        steps = self._at / START.slowed(ratio).step_time(0.0, 2.0, 100.0)
        return EngineCounts(self._at, steps, 0.0, 2.0 * steps, 2, 100.0)

    @property
    def slowness(self) -> list[float]:
        """c0 of each as a multiple of the profile's."""
        return [one.model.c0 / START.c0 for one in self.replicas]


def test_of_two_the_one_not_measured_is_taken_to_be_as_the_other() -> None:
    pool = Pool(2.0, None)
    assert pool.slowness == [1.0, 1.0]
    pool.poll(30)
    assert pool.slowness == pytest.approx([2.0, 2.0], rel=0.05)


def test_what_was_measured_of_a_replica_outweighs_the_others() -> None:
    pool = Pool(1.0, 3.0)
    pool.poll(30)
    assert pool.slowness == pytest.approx([1.0, 3.0], rel=0.05)


def test_of_more_the_median_counts() -> None:
    pool = Pool(1.0, 2.0, 9.0, None)
    pool.poll(30)
    assert pool.slowness[-1] == pytest.approx(2.0, rel=0.05)


def test_one_that_is_idle_long_enough_is_as_the_other_again() -> None:
    """Its own ratio is in the median no more, so it does not hold itself up."""
    pool = Pool(1.0, 3.0)
    pool.poll(30)
    pool.ratios[1] = None
    pool.poll(20 * 60)
    assert pool.slowness == pytest.approx([1.0, 1.0], rel=0.05)


def test_when_all_are_idle_the_profile_counts_again() -> None:
    pool = Pool(2.0, 3.0)
    pool.poll(30)
    pool.poll(20 * 60, working=False)
    assert pool.slowness == pytest.approx([1.0, 1.0], rel=0.05)
