"""Delays of first tokens outside the engine's steps, and error quantiles, are learned."""

from math import inf
from random import Random

import pytest

from extproc.predict.correction import ErrorQuantile, FirstTokens


def observe_delays(
    tokens: FirstTokens, count: int, per_step: float, request: float, token: float
) -> None:
    draws = Random(count)
    for _ in range(count):
        step, prompt = draws.uniform(0.005, 0.03), draws.randrange(50, 9000)
        steps_s = step + prompt * 20e-6
        delay = per_step * step + request + token * prompt
        tokens.observe(step, prompt, steps_s, steps_s + delay)


def test_delays_per_step_request_and_token_are_separated() -> None:
    tokens = FirstTokens()
    observe_delays(tokens, 200, per_step=1.0, request=0.015, token=4e-6)
    assert tokens.outside_steps == pytest.approx((1.0, 0.015, 4e-6), rel=0.25)


def test_eight_first_tokens_give_most_of_the_delay() -> None:
    tokens = FirstTokens()
    observe_delays(tokens, 8, per_step=1.0, request=0.015, token=4e-6)
    each_step, request, token = tokens.outside_steps
    delay = each_step * 0.01 + request + 3000 * token
    assert delay == pytest.approx(0.01 + 0.015 + 0.012, rel=0.25)


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_delay_is_zero_if_first_tokens_come_no_later_than_predicted(ratio: float) -> None:
    tokens = FirstTokens()
    for _ in range(50):
        tokens.observe(0.01, 1000, 0.1, 0.1 * ratio)
    assert tokens.outside_steps == (0.0, 0.0, 0.0)


def test_a_few_very_late_first_tokens_change_the_delay_little() -> None:
    tokens = FirstTokens()
    observe_delays(tokens, 50, per_step=0.0, request=0.02, token=0.0)
    for _ in range(5):
        tokens.observe(0.01, 1000, 0.1, 60.0)
    tokens.observe(0.01, 1000, inf, 1.0)
    assert tokens.outside_steps[1] < 0.03


def test_delays_are_bounded() -> None:
    tokens = FirstTokens()
    observe_delays(tokens, 200, per_step=20.0, request=1.0, token=1e-3)
    each_step, request, token = tokens.outside_steps
    assert each_step <= 3.0
    assert request <= 0.05
    assert token <= 2e-5


def test_error_quantile_starts_at_1() -> None:
    assert ErrorQuantile().ratio == 1.0


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_nine_of_ten_requests_do_not_exceed_the_error_quantile(scale: float) -> None:
    draws, quantile = Random(1), ErrorQuantile()
    ratios = [scale * draws.lognormvariate(0.0, 0.4) for _ in range(3_000)]
    exceeded = 0
    for number, ratio in enumerate(ratios):
        exceeded += number >= 1_000 and ratio > quantile.ratio
        quantile.observe(2.0, 2.0 * ratio)
    assert exceeded / 2_000 == pytest.approx(0.1, abs=0.02)


def test_error_quantile_follows_a_change_within_200_requests() -> None:
    draws, quantile = Random(1), ErrorQuantile()
    for _ in range(1_000):
        quantile.observe(1.0, draws.uniform(0.9, 1.1))
    assert quantile.ratio == pytest.approx(1.08, abs=0.06)
    for _ in range(200):
        quantile.observe(1.0, draws.uniform(1.8, 2.2))
    assert quantile.ratio == pytest.approx(2.16, abs=0.2)


def test_times_of_zero_do_not_change_the_error_quantile() -> None:
    quantile = ErrorQuantile()
    quantile.observe(0.0, 1.0)
    quantile.observe(1.0, 0.0)
    assert quantile.ratio == 1.0
