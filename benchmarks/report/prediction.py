"""Picture of what was predicted, beside what it took."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmarks.report.figures import Contender
from benchmarks.report.style import FAINT, few_to_many, logarithmic, panels, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

_COLUMNS = 3
_CELLS = 44


def predictions(contender: Contender) -> tuple[Floats, Floats]:
    """Predicted and actual completion of every answered request that had a prediction."""
    pairs = [
        (one.predicted_completion_s, one.completion_s)
        for run in contender.runs
        for one in run.answered
        if one.predicted_completion_s
    ]
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return values[:, 0], values[:, 1]


def share_within(predicted: Floats, actual: Floats) -> tuple[float, float]:
    """Shares of requests that took what was predicted ±25%, and within a factor of two of it."""
    quotient = predicted / actual
    near = np.abs(quotient - 1) <= 0.25
    return float(near.mean()), float(((quotient >= 0.5) & (quotient <= 2)).mean())


def beside_actual(contenders: Sequence[Contender]) -> "Figure | None":
    """A panel for each contender that predicts: density of requests, logarithmic axes."""
    known = {one.name: predictions(one) for one in contenders}
    known = {name: pair for name, pair in known.items() if len(pair[0])}
    if not known:
        return None
    columns = min(len(known), _COLUMNS)
    rows = -(-len(known) // columns)
    size = (1.2 + 3.9 * columns, 0.6 + 4.0 * rows)
    figure, axes = panels(rows, columns, size, sharex=True, sharey=True)
    every = np.concatenate([value for pair in known.values() for value in pair])
    ends = float(every.min()) / 1.2, float(every.max()) * 1.2
    for axis, (name, (predicted, actual)) in zip(axes, known.items(), strict=False):
        _panel(axis, predicted, actual, ends)
        near, twice = share_within(predicted, actual)
        title(axis, name, f"{near:.0%} within ±25%, {twice:.0%} within a factor of 2")
    axes[0].legend(loc="lower right", frameon=False, fontsize=7.5)
    for axis in axes[len(known) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("predicted completion")
    for axis in axes[-columns:]:
        axis.set_xlabel("actual completion")
    return figure


def _panel(axis: "Axes", predicted: Floats, actual: Floats, ends: tuple[float, float]) -> None:
    extent = (*np.log10(ends), *np.log10(ends))
    axis.hexbin(
        actual,
        predicted,
        xscale="log",
        yscale="log",
        extent=extent,
        gridsize=_CELLS,
        bins="log",
        mincnt=1,
        cmap=few_to_many(),
        linewidths=0.1,
        rasterized=True,
    )
    line = np.array(ends)
    axis.plot(line, line, color=FAINT, lw=1.2, label="as predicted")
    axis.plot(line, line * 2, color=FAINT, lw=0.9, linestyle="--", label="off by a factor of 2")
    axis.plot(line, line / 2, color=FAINT, lw=0.9, linestyle="--")
    axis.set(xlim=ends, ylim=ends, aspect="equal")
    logarithmic(axis.xaxis)
    logarithmic(axis.yaxis)
    axis.tick_params(labelsize=8)
