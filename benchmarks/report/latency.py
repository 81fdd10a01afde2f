"""Pictures of latencies: every contender's figures, and its whole distribution."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmarks.report.figures import METRICS, Contender, Metric, measured, spread
from benchmarks.report.results import Request
from benchmarks.report.style import FAINT, apart, logarithmic, looks, panels, title
from benchmarks.report.units import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

_POINTS = 240
_MOST_NINES = 3.0
"""The curves end at 99.9%."""
_TICKS = (10, 50, 90, 99, 99.9)
"""Percentiles; the curves begin at the first."""


def at_a_glance(contenders: Sequence[Contender]) -> "Figure | None":
    """Median and spread of the figures that have a sentence on the page."""
    metrics = [one for one in METRICS if one.headline]
    metrics = [one for one in metrics if any(spread(each, one) for each in contenders)]
    if not metrics:
        return None
    height = 1.5 + 0.32 * len(contenders)
    figure, axes = panels(1, len(metrics), (1.8 + 2.6 * len(metrics), height), sharey=True)
    for axis, metric in zip(axes, metrics, strict=True):
        _dots(axis, contenders, metric)
    axes[0].set_yticks(range(len(contenders)), [one.name for one in contenders])
    axes[0].invert_yaxis()
    return figure


def distribution(
    contenders: Sequence[Contender], what: Callable[[Request], float | None], name: str
) -> "Figure | None":
    """Time by percentile, the tail stretched; a band from the least to the most over turns."""
    drawn = [one for one in contenders if any(measured(run, what) for run in one.runs)]
    if not drawn:
        return None
    figure, (axis,) = panels(1, 1, (10.0, 5.2))
    nines = np.linspace(-np.log10(1 - _TICKS[0] / 100), _nines(drawn, what), _POINTS)
    ends = []
    for one in drawn:
        look = looks(contenders)[one.name]
        curves = _curves(one, what, nines)
        middle = np.median(curves, axis=0)
        axis.plot(nines, middle, color=look.colour, linestyle=look.dashes, lw=1.8)
        if len(curves) > 1:
            band = (curves.min(axis=0), curves.max(axis=0))
            axis.fill_between(nines, *band, color=look.colour, alpha=0.15, lw=0)
        ends.append(float(middle[-1]))
    _percentile_axis(axis, float(nines[-1]))
    axis.set_yscale("log")
    logarithmic(axis.yaxis)
    axis.grid(axis="y", alpha=0.25)
    axis.set_ylabel(f"{name} (log scale)")
    _name_lines(axis, drawn, [looks(contenders)[one.name].colour for one in drawn], ends)
    return figure


def _dots(axis: "Axes", contenders: Sequence[Contender], metric: Metric) -> None:
    look = looks(contenders)
    for row, one in enumerate(contenders):
        its = spread(one, metric)
        if its is None:
            continue
        colour = look[one.name].colour
        axis.plot([its.least, its.most], [row, row], color=colour, lw=5, alpha=0.35)
        axis.plot(its.median, row, "o", color=colour, ms=6)
        axis.annotate(
            seconds(its.median),
            (its.most, row),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.set_xlim(low / 1.1, high * (high / low) ** 0.4 * 1.3)  # room for the figures
    logarithmic(axis.xaxis)
    axis.tick_params(axis="x", labelsize=8, colors=FAINT)
    axis.grid(axis="x", alpha=0.25)
    axis.tick_params(axis="y", length=0)
    title(axis, metric.name)


def _curves(one: Contender, what: Callable[[Request], float | None], nines: Floats) -> Floats:
    """Of every turn, the time that so large a part of the requests stay below."""
    timed = [values for run in one.runs if (values := measured(run, what))]
    return np.array([np.quantile(values, 1 - 10.0**-nines) for values in timed])


def _nines(drawn: Sequence[Contender], what: Callable[[Request], float | None]) -> float:
    """How far into the tail every run has requests: 2 is 99%."""
    fewest = min(
        len(values) for one in drawn for run in one.runs if (values := measured(run, what))
    )
    return min(max(float(np.log10(fewest)), 0.5), _MOST_NINES)


def _percentile_axis(axis: "Axes", end: float) -> None:
    shown = [(-np.log10(1 - tick / 100), f"p{tick:g}") for tick in _TICKS]
    shown = [(at, name) for at, name in shown if at <= end + 1e-9]
    axis.set_xticks([at for at, _ in shown], [name for _, name in shown])
    axis.set_xlim(shown[0][0], end)
    axis.set_xlabel("share of requests that take at most so long (p99: all but the slowest 1%)")
    axis.grid(axis="x", alpha=0.4)


def _name_lines(
    axis: "Axes", drawn: Sequence[Contender], colours: Sequence[str], ends: Sequence[float]
) -> None:
    """Beside the end of each line its name."""
    low, high = np.log(axis.get_ylim())
    to_the_line = {"arrowstyle": "-", "lw": 1.6, "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 0}
    heights = [float((np.log(end) - low) / (high - low)) for end in ends]
    for one, colour, was, at in zip(
        drawn, colours, heights, apart(heights, 0.05, 0.0, 1.0), strict=True
    ):
        axis.annotate(
            one.name,
            (1.0, was),
            (1.03, at),
            "axes fraction",
            "axes fraction",
            va="center",
            fontsize=9.5,
            arrowprops=to_the_line | {"color": colour},
            annotation_clip=False,
        )
