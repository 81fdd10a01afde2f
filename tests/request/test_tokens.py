"""The learned ratio of bytes to tokens, by model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.tokens import TokenCounter
from tests.request.conftest import counter_of


@pytest.fixture
def counter() -> TokenCounter:
    return counter_of(bytes_per_token=4.0)


def test_ratio_starts_from_the_configuration(counter: TokenCounter) -> None:
    assert counter.bytes_per_token("m") == 4.0
    assert counter.count("m", ["x" * 40, "é" * 20]) == 20


def test_ratio_follows_a_change(counter: TokenCounter) -> None:
    for _ in range(1_000):
        counter.learn("m", 2_000, 1_000)
    for _ in range(1_000):
        counter.learn("m", 6_000, 1_000)
    assert counter.bytes_per_token("m") == pytest.approx(6.0, rel=0.05)


def test_one_odd_report_changes_the_ratio_little(counter: TokenCounter) -> None:
    for _ in range(200):
        counter.learn("m", 4_000, 1_000)
    counter.learn("m", 30_000_000, 1_000_000)
    assert counter.bytes_per_token("m") < 8.0


@pytest.mark.parametrize(("prompt_bytes", "prompt_tokens"), [(0, 10), (10, 1_000), (1_000, 1)])
def test_implausible_reports_change_nothing(
    counter: TokenCounter, prompt_bytes: int, prompt_tokens: int
) -> None:
    counter.learn("m", prompt_bytes, prompt_tokens)
    assert counter.bytes_per_token("m") == 4.0


@given(st.lists(st.tuples(st.integers(0), st.integers(1)), max_size=50))
def test_ratio_stays_plausible_after_any_reports(reports: list[tuple[int, int]]) -> None:
    counter = counter_of(bytes_per_token=4.0)
    for report in reports:
        counter.learn("m", *report)
    assert 0.5 <= counter.bytes_per_token("m") <= 32.0


def test_number_of_remembered_models_is_bounded(counter: TokenCounter) -> None:
    for i in range(3_000):
        counter.learn(f"model-{i}", 20_000, 10_000)
        counter.learn("used", 20_000, 10_000)
    assert counter.bytes_per_token("model-0") == 4.0
    assert counter.bytes_per_token("model-2999") < 4.0
    assert counter.bytes_per_token("used") == pytest.approx(2.0, rel=0.05)
