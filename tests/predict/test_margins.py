"""How much longer than predicted requests take at the most, but for one of ten."""

import random

import pytest

from extproc.predict.correction import Margin


def test_nothing_is_known_at_first() -> None:
    assert Margin().ratio == 1.0


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_nine_of_ten_take_no_longer(scale: float) -> None:
    draws, margin = random.Random(1), Margin()
    ratios = [scale * draws.lognormvariate(0.0, 0.4) for _ in range(3_000)]
    exceeded = 0
    for number, ratio in enumerate(ratios):
        exceeded += number >= 1_000 and ratio > margin.ratio
        margin.observe(2.0, 2.0 * ratio)
    assert exceeded / 2_000 == pytest.approx(0.1, abs=0.02)


def test_it_follows_what_changes() -> None:
    draws, margin = random.Random(1), Margin()
    for _ in range(1_000):
        margin.observe(1.0, draws.uniform(0.9, 1.1))
    assert margin.ratio == pytest.approx(1.08, abs=0.06)
    for _ in range(200):
        margin.observe(1.0, draws.uniform(1.8, 2.2))
    assert margin.ratio == pytest.approx(2.16, abs=0.2)


def test_what_took_no_time_tells_nothing() -> None:
    margin = Margin()
    margin.observe(0.0, 1.0)
    margin.observe(1.0, 0.0)
    assert margin.ratio == 1.0
