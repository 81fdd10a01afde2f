import random
from math import inf
from random import Random

import pytest

from extproc.predict.correction import ErrorQuantile, FirstTokens


def seen(tokens: FirstTokens, count: int, per_step: float, request: float, token: float) -> None:
    """First tokens that came so much later than by the steps."""
    random = Random(count)
    for _ in range(count):
        step, prompt = random.uniform(0.005, 0.03), random.randrange(50, 9000)
        steps_s = step + prompt * 20e-6
        unseen = per_step * step + request + token * prompt
        tokens.observe(step, prompt, steps_s, steps_s + unseen)


def test_what_no_step_shows_is_told_apart() -> None:
    tokens = FirstTokens()
    seen(tokens, 200, per_step=1.0, request=0.015, token=4e-6)
    assert tokens.outside_steps == pytest.approx((1.0, 0.015, 4e-6), rel=0.25)


def test_a_few_first_tokens_tell_most_of_it() -> None:
    tokens = FirstTokens()
    seen(tokens, 8, per_step=1.0, request=0.015, token=4e-6)
    each_step, request, token = tokens.outside_steps
    told = each_step * 0.01 + request + 3000 * token
    assert told == pytest.approx(0.01 + 0.015 + 0.012, rel=0.25)


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_where_steps_tell_all_or_too_much_there_is_nothing(ratio: float) -> None:
    tokens = FirstTokens()
    for _ in range(50):
        tokens.observe(0.01, 1000, 0.1, 0.1 * ratio)
    assert tokens.outside_steps == (0.0, 0.0, 0.0)


def test_accidents_count_for_little() -> None:
    tokens = FirstTokens()
    seen(tokens, 50, per_step=0.0, request=0.02, token=0.0)
    for _ in range(5):
        tokens.observe(0.01, 1000, 0.1, 60.0)
    tokens.observe(0.01, 1000, inf, 1.0)
    assert tokens.outside_steps[1] < 0.03


def test_no_more_is_believed_than_can_be() -> None:
    tokens = FirstTokens()
    seen(tokens, 200, per_step=20.0, request=1.0, token=1e-3)
    each_step, request, token = tokens.outside_steps
    assert each_step <= 3.0
    assert request <= 0.05
    assert token <= 2e-5


def test_nothing_is_known_at_first() -> None:
    assert ErrorQuantile().ratio == 1.0


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_nine_of_ten_take_no_longer(scale: float) -> None:
    draws, quantile = random.Random(1), ErrorQuantile()
    ratios = [scale * draws.lognormvariate(0.0, 0.4) for _ in range(3_000)]
    exceeded = 0
    for number, ratio in enumerate(ratios):
        exceeded += number >= 1_000 and ratio > quantile.ratio
        quantile.observe(2.0, 2.0 * ratio)
    assert exceeded / 2_000 == pytest.approx(0.1, abs=0.02)


def test_it_follows_what_changes() -> None:
    draws, quantile = random.Random(1), ErrorQuantile()
    for _ in range(1_000):
        quantile.observe(1.0, draws.uniform(0.9, 1.1))
    assert quantile.ratio == pytest.approx(1.08, abs=0.06)
    for _ in range(200):
        quantile.observe(1.0, draws.uniform(1.8, 2.2))
    assert quantile.ratio == pytest.approx(2.16, abs=0.2)


def test_what_took_no_time_tells_nothing() -> None:
    quantile = ErrorQuantile()
    quantile.observe(0.0, 1.0)
    quantile.observe(1.0, 0.0)
    assert quantile.ratio == 1.0
