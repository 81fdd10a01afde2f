"""Pictures of a report: PNGs on white. Needs matplotlib."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import YAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.report.figures import (
    HEADLINES,
    ContenderRuns,
    TurnSpread,
    contenders,
    measured,
    rivals,
    spread,
)
from benchmarks.report.results import Results
from benchmarks.report.words import seconds

_DPI = 120
_GREY = "#c9c9c8"
# Okabe and Ito's colours, told apart by the colour-blind; orange and sky blue darker, for white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c58a00", "#3fa0db")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)))  # of the first round of colours, the second, …
_PERCENTILES = (10, 50, 90, 99, 99.9)  # that the axis of a distribution names
_POINTS = 240

Panels = Mapping[str, Mapping[str, tuple[TurnSpread, str]]]
"""Spread and mark of a bar, by the title of its panel and the name of its row."""


def draw(results: Results) -> dict[str, bytes]:
    """PNGs by name; pictures without any data are left out."""
    with rc_context({"text.parse_math": False}):  # a dollar in a name begins no formula
        return dict(_pictures(results))


def _pictures(results: Results) -> Iterator[tuple[str, bytes]]:
    every = contenders(results)
    panels = {
        metric.name: {
            contender.name: (turns, "")
            for contender in every
            if (turns := spread(contender, metric)) is not None
        }
        for metric in HEADLINES
    }
    panels = {title: rows for title, rows in panels.items() if rows}
    if len(every) > 1 and panels:
        subject, _ = rivals(every, results.ours)
        yield "figures", bars(panels, subject.name if subject else "")
    for name, label in (("completion", "completion"), ("ttft", "time to first token")):
        timed = {
            contender.name: [
                values for run in contender.runs if (values := measured(run, f"{name}_s"))
            ]
            for contender in every
        }
        if any(timed.values()):
            styles = _styles(every)
            yield name, _distribution({key: of for key, of in timed.items() if of}, styles, label)


def _styles(every: Sequence[ContenderRuns]) -> dict[str, tuple[str, Any]]:
    """Colour and dashes by name; a reference is black."""
    styles: dict[str, tuple[str, Any]] = {
        contender.name: ("black", (0, (4, 2))) for contender in every
    }
    drawn = [contender.name for contender in every if not contender.reference]
    for n, name in enumerate(drawn):
        styles[name] = _COLOURS[n % len(_COLOURS)], _DASHES[n // len(_COLOURS) % len(_DASHES)]
    return styles


def bars(panels: Panels, highlighted: str) -> bytes:
    """PNG with a panel for each title, and in it a bar from zero for each name.

    The bar called ``highlighted`` is in colour. Each has its median and its mark beside it, and a
    line from the least to the greatest turn.
    """
    names = list(dict.fromkeys(name for rows in panels.values() for name in rows))
    size = 1.8 + 2.9 * len(panels), 0.9 + 0.32 * len(names)
    figure, axes = _axes(len(panels), size, sharey=True)
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        for name, (turns, mark) in rows.items():
            row, colour = names.index(name), _COLOURS[0] if name == highlighted else _GREY
            axis.barh(row, turns.median, color=colour, height=0.6)
            axis.plot([turns.least, turns.most], [row, row], color="black", lw=1)
            text, place = f"{seconds(turns.median)}{mark}", (turns.most, row)
            offset: Any = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
            axis.annotate(text, place, fontsize=9, **offset)
        axis.set_xlim(0, 1.3 * max(turns.most for turns, _ in rows.values()))
        axis.xaxis.set_visible(False)
        axis.spines["bottom"].set_visible(False)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=8)
    axes[0].set_yticks(range(len(names)), names, fontsize=10)
    axes[0].tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    return _png(figure)


def _distribution(
    timed: Mapping[str, Sequence[Sequence[float]]],
    styles: Mapping[str, tuple[str, Any]],
    label: str,
) -> bytes:
    """Curves of time by percentile, the tail stretched, each in the band of its turns."""
    figure, (axis,) = _axes(1, (10.0, 5.2))
    fewest = min(len(values) for turns in timed.values() for values in turns)
    begin, end = (_nines(percent) for percent in (_PERCENTILES[0], _PERCENTILES[-1]))
    end = min(max(float(np.log10(fewest)), 0.5), end)
    nines = np.linspace(begin, end, _POINTS)
    for name, turns in timed.items():
        colour, dashes = styles[name]
        curves = np.array([np.quantile(values, 1 - 10.0**-nines) for values in turns])
        middle = np.median(curves, axis=0)
        axis.plot(nines, middle, color=colour, linestyle=dashes, lw=1.8, label=name)
        if len(curves) > 1:
            band = curves.min(axis=0), curves.max(axis=0)
            axis.fill_between(nines, *band, color=colour, alpha=0.15, lw=0)
    shown = [percent for percent in _PERCENTILES if _nines(percent) <= end + 1e-9]
    axis.set_xticks([_nines(percent) for percent in shown], [f"p{percent:g}" for percent in shown])
    axis.set_xlim(begin, end)
    axis.set_xlabel("share of requests that take at most this time (p99: all but the slowest 1%)")
    axis.set_ylabel(f"{label} (log scale)")
    axis.set_yscale("log")
    _tick_seconds(axis.yaxis)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
    return _png(figure)


def _nines(percent: float) -> float:
    """Position in the tail: 1 for 90%, 2 for 99%."""
    return float(-np.log10(1 - percent / 100))


def _axes(columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(size, layout="compressed")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, columns, squeeze=False, **shared).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
    return figure, axes


def _tick_seconds(axis: YAxis) -> None:
    """Ticks of a logarithmic axis of seconds: more in each decade, the fewer decades it has."""
    low, high = axis.get_view_interval()
    decades = np.log10(high / low)
    multiples = range(1, 10) if decades < 0.6 else (1, 2, 5) if decades < 2.5 else (1,)
    axis.set_major_locator(LogLocator(10, subs=multiples))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(
        lambda value, _: f"{1000 * value:g} ms" if value < 0.9995 else f"{value:g} s"
    )


def _png(figure: Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=_DPI, facecolor="white")
    return written.getvalue()
