"""Rates and quantiles of the last minute, ten minutes and hour, and fading averages."""

from math import isnan

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from extproc.observe.history import Average, History, quantile
from extproc.observe.metrics import RouterMetrics
from tests.fakes import ManualClock


def test_each_figure_covers_its_period() -> None:
    clock, metrics = ManualClock(0.0), RouterMetrics(CollectorRegistry())
    history = History(metrics, clock)
    for second in range(7200):
        metrics.requests.add("routed")
        if second >= 7200 - 300:  # the last five minutes
            metrics.requests.add("refused")
            metrics.refused.add("saturated")
            metrics.completion.observe(2.0, None, "m", "")
        clock.advance(1.0)
        history.look()
    figures = history.figures()
    assert figures["Requests/s"] == pytest.approx([2.0, 1.5, 1.08], rel=0.02)
    assert figures["429/s"] == pytest.approx([1.0, 0.5, 300 / 3600], rel=0.02)
    hour = {title: values[-1] for title, values in figures.items()}
    assert all(isnan(hour[title]) for title in ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"))
    assert 1.0 <= hour["Completion p50"] <= hour["Completion p99"] <= 2.5


def test_young_router_shows_its_life() -> None:
    clock, metrics = ManualClock(0.0), RouterMetrics(CollectorRegistry())
    history = History(metrics, clock)
    metrics.requests.add("routed", by=20)
    metrics.requests.add("unanswered", by=5)
    metrics.requests.add("lost")
    metrics.responses.add("5xx", by=2)
    metrics.refused.add("service_unavailable_error")
    metrics.refused.add("no_memory")
    clock.advance(10.0)
    figures = history.figures()
    assert figures["Requests/s"] == [2.0, 2.0, 2.0]
    assert figures["5xx/s"] == [0.5, 0.5, 0.5]


def test_figures_after_a_pause_cover_the_time_since_the_last_totals() -> None:
    clock, metrics = ManualClock(0.0), RouterMetrics(CollectorRegistry())
    history = History(metrics, clock)
    metrics.requests.add("routed", by=200)
    clock.advance(100.0)  # the process stood still
    assert history.figures()["Requests/s"][0] == 2.0


@pytest.mark.parametrize(("q", "expected"), [(0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0)])
def test_quantile_is_linear_within_a_bucket(q: float, expected: float) -> None:
    assert quantile((1.0, 2.0), np.array([5, 10, 10]), q) == expected


def test_values_beyond_the_last_bound_count_as_that_bound() -> None:
    assert quantile((1.0, 2.0), np.array([0, 0, 4]), 0.99) == 2.0


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
