"""Figures, the table of them, and the warnings that they are not to be trusted."""

import pytest

from benchmarks.load.client import Sent, Traffic
from benchmarks.load.effort import Effort
from benchmarks.load.summary import summary, table

IDLE = Effort(0.1, 0.1)


def sent(number: int, late_s: float = 0.0, generated: int = 10) -> Sent:
    return Sent(
        at_s=float(number),
        late_s=late_s,
        endpoint="chat",
        streamed=True,
        prompt_tokens=100,
        max_tokens=None,
        planned_output_tokens=10,
        request_id=str(number),
        counted_prompt_tokens=100,
        output_tokens=generated,
        ttft_s=0.1 * number,
        replica="a" if number % 2 else "b",
    )


def traffic(*requests: Sent, failed: dict[int, str] | None = None) -> Traffic:
    """Each takes a second; some fail, by their place."""
    run = Traffic()
    for place, one in enumerate(requests):
        run.begin(one)
        one.error = (failed or {}).get(place)
        run.end(one, 1.0)
    return run


def test_figures_are_of_whole_answers() -> None:
    run = traffic(*(sent(n) for n in range(5)), failed={1: "connect", 3: "connect"})
    figures = summary(run, IDLE, left_out=7)
    assert (figures["requests"], figures["answered"], figures["failed"]) == (5, 3, 2)
    assert figures["errors"] == {"connect": 2}
    assert figures["ttft_s"]["mean"] == pytest.approx(0.2)
    assert figures["requests_per_s"] == pytest.approx(3 / 5)
    assert figures["output_tokens_per_s"] == pytest.approx(30 / 5)
    assert figures["prompt_tokens"] == {"planned": 300, "counted": 300}
    replicas = figures["replicas"]
    assert {name: (one["requests"], one["failed"]) for name, one in replicas.items()} == {
        "a": (2, 2),
        "b": (3, 0),
    }
    assert replicas["a"]["ttft_s"] is None
    assert figures["warnings"] == []
    text = table(figures)
    assert "3 of 5 requests answered" in text
    assert "failed: 2 × connect" in text
    assert "no room for them: 7" in text


def test_nothing_was_answered() -> None:
    figures = summary(traffic(sent(1), failed={0: "timeout"}), IDLE)
    assert figures["ttft_s"] is figures["completion_s"] is figures["gap_s"] is None
    assert "0 of 1 requests answered" in table(figures)


@pytest.mark.parametrize(
    ("run", "effort", "warning"),
    [
        (traffic(sent(1), sent(2, late_s=0.5)), IDLE, "ms late at p99"),
        (traffic(sent(1)), Effort(1.0, 0.95), "95% of a core"),
        (traffic(sent(1, generated=16)), IDLE, "output tokens are 160% of the trace's"),
    ],
)
def test_what_makes_figures_worthless_is_said(run: Traffic, effort: Effort, warning: str) -> None:
    figures = summary(run, effort)
    (said,) = figures["warnings"]
    assert warning in said
    assert f"WARNING: {said}" in table(figures)
