"""Pictures of a report: PNGs on white. Needs matplotlib."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.report.figures import HEADLINES, Contender, Spread, contenders, measured, spread
from benchmarks.report.results import Event, Results, Run
from benchmarks.report.words import seconds
from extproc.predict.inputs import Floats

_DPI = 120
_FAINT = "#8b8b8a"
_BARS = "#c9c9c8"
# Okabe and Ito's colours, told apart by the colour-blind; orange and sky blue darker, for white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c58a00", "#3fa0db")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)))  # of the first round of colours, the second, …
_FEW_TO_MANY = ListedColormap(colormaps["viridis"](np.linspace(0.18, 0.92, 256)))
_SHARES = (10, 50, 90, 99, 99.9)  # percentiles that a distribution's axis names
_POINTS = 240
_MOMENTS = 300  # points in time at which the load is drawn
_MOST_NAMED = 16  # replicas named beside a panel; of more of them every second, third, …


def draw(results: Results) -> dict[str, bytes]:
    """PNGs by name; pictures without any data are left out."""
    with rc_context({"text.parse_math": False}):  # a name is text, whatever dollars it has
        return {name: _png(figure) for name, figure in _figures(results) if figure is not None}


def _figures(results: Results) -> Iterator[tuple[str, Figure | None]]:
    every = contenders(results)
    if len(every) > 1:
        yield "figures", _at_a_glance(every)
    yield "completion", _distribution(every, "completion_s", "completion")
    yield "ttft", _distribution(every, "ttft_s", "time to first token")
    yield "load", _load(every, results.events)
    yield "prediction", _predictions(every)


def looks(every: Sequence[Contender]) -> dict[str, tuple[str, Any]]:
    """Colour and dashes by name; a reference is black."""
    drawn = [one.name for one in every if not one.reference]
    found: dict[str, tuple[str, Any]] = {one.name: ("black", (0, (4, 2))) for one in every}
    for n, name in enumerate(drawn):
        found[name] = _COLOURS[n % len(_COLOURS)], _DASHES[n // len(_COLOURS) % len(_DASHES)]
    return found


def _at_a_glance(every: Sequence[Contender]) -> Figure | None:
    """Medians and spreads of the headlines."""
    metrics = [one for one in HEADLINES if any(spread(each, one) for each in every)]
    if not metrics:
        return None
    size = 1.8 + 2.6 * len(metrics), 1.5 + 0.32 * len(every)
    figure, axes = _panels(1, len(metrics), size, sharey=True)
    for axis, metric in zip(axes, metrics, strict=True):
        for row, one in enumerate(every):
            if its := spread(one, metric):
                colour, _ = looks(every)[one.name]
                axis.plot([its.least, its.most], [row, row], color=colour, lw=5, alpha=0.35)
                axis.plot(its.median, row, "o", color=colour, ms=6)
                _beside(axis, seconds(its.median), its.most, row)
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        axis.set_xlim(low / 1.1, high * (high / low) ** 0.4 * 1.3)  # room for the figures
        _logarithmic(axis.xaxis)
        _title(axis, metric.name)
    _name_rows(axes[0], [one.name for one in every])
    return figure


def glance(panels: Mapping[str, Mapping[str, tuple[Spread, str]]], of: str) -> bytes:
    """PNG of a panel for each title with a bar from zero, a figure and a mark for each name.

    The bar named ``of`` is in colour.
    """
    names = list(dict.fromkeys(name for bars in panels.values() for name in bars))
    size = 1.8 + 2.9 * len(panels), 0.9 + 0.32 * len(names)
    figure, axes = _panels(1, len(panels), size, sharey=True)
    for axis, (title, bars) in zip(axes, panels.items(), strict=True):
        for name, (its, mark) in bars.items():
            row, colour = names.index(name), _COLOURS[0] if name == of else _BARS
            axis.barh(row, its.median, color=colour, height=0.6)
            axis.plot([its.least, its.most], [row, row], color="black", lw=1)
            _beside(axis, f"{seconds(its.median)}{mark}", its.most, row)
        axis.set_xlim(0, 1.3 * max(its.most for its, _ in bars.values()))
        axis.xaxis.set_visible(False)
        axis.spines["bottom"].set_visible(False)
        _title(axis, title)
    _name_rows(axes[0], names)
    return _png(figure)


def _distribution(every: Sequence[Contender], what: str, name: str) -> Figure | None:
    """Curves of time by percentile, the tail stretched, each in the band of its turns."""
    timed = {
        one.name: [values for run in one.runs if (values := measured(run, what))] for one in every
    }
    timed = {name: runs for name, runs in timed.items() if runs}
    if not timed:
        return None
    figure, (axis,) = _panels(1, 1, (10.0, 5.2))
    fewest = min(len(values) for runs in timed.values() for values in runs)
    begin, end = (_nines(share) for share in (_SHARES[0], _SHARES[-1]))
    end = min(max(float(np.log10(fewest)), 0.5), end)
    nines = np.linspace(begin, end, _POINTS)
    for one, runs in timed.items():
        colour, dashes = looks(every)[one]
        curves = np.array([np.quantile(values, 1 - 10.0**-nines) for values in runs])
        middle = np.median(curves, axis=0)
        axis.plot(nines, middle, color=colour, linestyle=dashes, lw=1.8, label=one)
        if len(curves) > 1:
            band = curves.min(axis=0), curves.max(axis=0)
            axis.fill_between(nines, *band, color=colour, alpha=0.15, lw=0)
    shown = [share for share in _SHARES if _nines(share) <= end + 1e-9]
    axis.set_xticks([_nines(share) for share in shown], [f"p{share:g}" for share in shown])
    axis.set_xlim(begin, end)
    axis.set_xlabel("share of requests that take at most so long (p99: all but the slowest 1%)")
    axis.set_ylabel(f"{name} (log scale)")
    axis.set_yscale("log")
    _logarithmic(axis.yaxis)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
    return figure


def _nines(percent: float) -> float:
    """Position in the tail: 2 is 99%."""
    return float(-np.log10(1 - percent / 100))


def _load(every: Sequence[Contender], events: Sequence[Event]) -> Figure | None:
    """Requests on each replica over time, in the first turn of each contender."""
    runs = [(one.name, min(one.runs, key=lambda run: run.repeat)) for one in every]
    named = {one.replica for _, run in runs for one in run.requests if one.replica}
    replicas = sorted(named, key=_natural)
    if not replicas:
        return None
    end = max((one.ended_s or one.sent_s for _, run in runs for one in run.requests), default=1e-3)
    times = (np.arange(_MOMENTS) + 0.5) * end / _MOMENTS
    loads = [np.stack([in_flight(run, one, times) for one in replicas]) for _, run in runs]
    norm = LogNorm(1, max(2.0, *(float(load.max()) for load in loads)))
    height = 1.1 + len(runs) * (0.55 + 0.16 * min(max(len(replicas), 3), _MOST_NAMED))
    figure, axes = _panels(len(runs), 1, (10.0, height), sharex=True)
    edges = np.linspace(0.0, end, _MOMENTS + 1), np.arange(len(replicas) + 1)
    every_nth = -(-len(replicas) // _MOST_NAMED)
    happened = [one for one in events if one.at_s <= end]
    for axis, (name, _), load in zip(axes, runs, loads, strict=True):
        seen = np.ma.masked_less(load, 0.5)
        mesh = axis.pcolormesh(*edges, seen, norm=norm, cmap=_FEW_TO_MANY, rasterized=True)
        axis.invert_yaxis()
        rows = np.arange(0, len(replicas), every_nth) + 0.5
        axis.set_yticks(rows, replicas[::every_nth], fontsize=8)
        _title(axis, name)
        for event in happened:
            axis.axvline(event.at_s, color=_FAINT, linestyle=":", lw=1)
    told = "; ".join(f"{one.at_s:g} s: {one.text}" for one in happened[:6])
    axes[-1].set_xlabel("seconds from the start" + (f"\ndotted — {told}" if told else ""))
    bar = figure.colorbar(mesh, ax=axes, label="requests on the replica", aspect=30, pad=0.02)
    bar.ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.minorticks_off()
    return figure


def in_flight(run: Run, replica: str, times: Floats) -> Floats:
    """Requests that were sent to a replica and had not ended, at points in time."""
    here = [(one.sent_s, one.ended_s) for one in run.requests if one.replica == replica]
    known = np.array([pair for pair in here if pair[1] is not None], float).reshape(-1, 2)
    came, gone = (np.searchsorted(np.sort(column), times, side="right") for column in known.T)
    return (came - gone).astype(np.float64)


def _predictions(every: Sequence[Contender]) -> Figure | None:
    """Densities of predicted and actual completions, a panel for each contender that predicts."""
    known = {one.name: pairs for one in every if len(pairs := _pairs(one))}
    if not known:
        return None
    columns = min(len(known), 3)
    rows = -(-len(known) // columns)
    size = 1.2 + 3.9 * columns, 0.6 + 4.0 * rows
    figure, axes = _panels(rows, columns, size, sharex=True, sharey=True)
    both = np.concatenate(list(known.values()))
    ends = float(both.min()) / 1.2, float(both.max()) * 1.2
    for axis, (name, pairs) in zip(axes, known.items(), strict=False):
        _density(axis, pairs, ends)
        near, twice = share_within(pairs)
        _title(axis, name, f"{near:.0%} within ±25%, {twice:.0%} within a factor of 2")
    axes[0].legend(loc="lower right", frameon=False, fontsize=7.5)
    for axis in axes[len(known) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("predicted completion")
    for axis in axes[-columns:]:
        axis.set_xlabel("actual completion")
    return figure


def _pairs(contender: Contender) -> Floats:
    """Predicted and actual completion of every answered request that had a prediction."""
    answered = (one for run in contender.runs for one in run.answered)
    pairs = [(one.predicted_completion_s, one.completion_s) for one in answered]
    return np.array([pair for pair in pairs if pair[0]], float).reshape(-1, 2)


def share_within(pairs: Floats) -> tuple[float, float]:
    """Shares of requests that took what was predicted ±25%, and within a factor of two of it."""
    quotient = pairs[:, 0] / pairs[:, 1]
    near, twice = np.abs(quotient - 1) <= 0.25, (quotient >= 0.5) & (quotient <= 2)
    return float(near.mean()), float(twice.mean())


def _density(axis: Axes, pairs: Floats, ends: tuple[float, float]) -> None:
    predicted, actual = pairs.T
    scales: Any = {"xscale": "log", "yscale": "log", "extent": (*np.log10(ends), *np.log10(ends))}
    counts: Any = {"gridsize": 44, "bins": "log", "mincnt": 1, "cmap": _FEW_TO_MANY}
    axis.hexbin(actual, predicted, linewidths=0.1, rasterized=True, **scales, **counts)
    line = np.array(ends)
    axis.plot(line, line, color=_FAINT, lw=1.2, label="as predicted")
    axis.plot(line, line * 2, color=_FAINT, lw=0.9, linestyle="--", label="off by a factor of 2")
    axis.plot(line, line / 2, color=_FAINT, lw=0.9, linestyle="--")
    axis.set(xlim=ends, ylim=ends, aspect="equal")
    _logarithmic(axis.xaxis)
    _logarithmic(axis.yaxis)


# -- how they look --------------------------------------------------------------------------


def _panels(
    rows: int, columns: int, size: tuple[float, float], **shared: Any
) -> tuple[Figure, list[Axes]]:
    figure = Figure(size, layout="compressed")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
    return figure, axes


def _title(axis: Axes, text: str, more: str = "") -> None:
    axis.set_title(text, loc="left", fontsize=11, fontweight="bold", pad=22 if more else 8)
    offset = (0, 6), "axes fraction", "offset points"
    axis.annotate(more, (0, 1), *offset, color=_FAINT, fontsize=9)


def _name_rows(axis: Axes, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), names, fontsize=10)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()


def _beside(axis: Axes, text: str, x: float, row: int) -> None:
    axis.annotate(text, (x, row), (7, 0), textcoords="offset points", va="center", fontsize=9)


def _logarithmic(axis: XAxis | YAxis) -> None:
    """Ticks of a logarithmic axis of seconds; the fewer decades it has, the more of them."""
    low, high = axis.get_view_interval()
    decades = np.log10(high / low)
    of_ten = range(1, 10) if decades < 0.6 else (1, 2, 5) if decades < 2.5 else (1,)
    axis.set_major_locator(LogLocator(10, subs=of_ten))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(
        lambda value, _: f"{1000 * value:g} ms" if value < 0.9995 else f"{value:g} s"
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """a-2 before a-10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def _png(figure: Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=_DPI, facecolor="white")
    return written.getvalue()
