"""Picture of what the router adds, and what it costs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.report.results import Setup
from benchmarks.report.style import FAINT, panels, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE = "#0072b2", "#c58a00"


def costs(setups: Sequence[Setup]) -> "Figure":
    """Latency, throughput, CPU and memory of every setup, a row each."""
    figure, axes = panels(1, 4, (13.0, 1.7 + 0.36 * len(setups)), sharey=True)
    _latencies(axes[0], setups)
    _bars(axes[1], setups, "Requests a second", "higher is better", lambda one: one.requests_per_s)
    _bars(
        axes[2], setups, "Router's CPU per request, µs", "lower is better", lambda one: one.cpu_us
    )
    _bars(
        axes[3],
        setups,
        "Router's memory per stream, kB",
        "lower is better",
        lambda one: one.stream_kb,
    )
    axes[0].set_yticks(range(len(setups)), [one.name for one in setups])
    axes[0].invert_yaxis()
    return figure


def _latencies(axis: "Axes", setups: Sequence[Setup]) -> None:
    """p50 and p99 with a line between them."""
    for row, one in enumerate(setups):
        axis.plot([one.rate.p50_ms, one.rate.p99_ms], [row, row], color=_BLUE, lw=3, alpha=0.35)
        axis.plot(one.rate.p50_ms, row, "o", color=_BLUE, ms=6)
        axis.plot(one.rate.p99_ms, row, "D", color=_ORANGE, ms=6)
        text = f"{one.rate.p50_ms:.1f} … {one.rate.p99_ms:.1f}"
        _say(axis, text, one.rate.p99_ms, row)
    _finish(axis, 1.45 * max(one.rate.p99_ms for one in setups))
    title(axis, "Latency, ms", "● p50 … ◆ p99; lower is better")


def _bars(
    axis: "Axes", setups: Sequence[Setup], name: str, more: str, of: Callable[[Setup], float]
) -> None:
    for row, one in enumerate(setups):
        axis.barh(row, of(one), color=_BLUE, height=0.5)
        _say(axis, f"{of(one):,.0f}", of(one), row)
    _finish(axis, 1.3 * max(*(of(one) for one in setups), 1.0))
    title(axis, name, more)


def _say(axis: "Axes", text: str, x: float, row: int) -> None:
    axis.annotate(text, (x, row), (7, 0), textcoords="offset points", va="center", fontsize=9)


def _finish(axis: "Axes", most: float) -> None:
    axis.set_xlim(0, most)
    axis.tick_params(axis="x", labelsize=8, colors=FAINT)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", alpha=0.25)
