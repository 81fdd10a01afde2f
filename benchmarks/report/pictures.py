"""Draws the bar charts of a report and of the README as PNG; needs matplotlib."""

import io
from collections.abc import Mapping
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.report.figures import HEADLINES, TurnSpread, contenders, rivals, spread
from benchmarks.report.results import Results
from benchmarks.report.words import short

_DPI = 120
_GREY, _BLUE = "#c9c9c8", "#0072b2"  # blue of Okabe and Ito, for the colour-blind

Panels = Mapping[str, Mapping[str, tuple[TurnSpread, str]]]
"""Spread and mark of a bar, by the title of its panel and the name of its row."""


def draw(results: Results) -> bytes | None:
    """PNG with the headline figures of all contenders; None if there is nothing to compare."""
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
    if len(every) == 1 or not panels:
        return None
    subject, _ = rivals(every, results.ours)
    with rc_context({"text.parse_math": False}):  # a dollar in a name begins no formula
        return bars(panels, subject.name if subject else "")


def bars(panels: Panels, highlighted: str) -> bytes:
    """PNG with a panel for each title, and in each panel a bar from zero for each name.

    The bar named ``highlighted`` is blue, the others are grey. A bar ends at the median, where its
    figure and mark stand. A line spans the lowest and the highest run.
    """
    names = list(dict.fromkeys(name for rows in panels.values() for name in rows))
    figure = Figure((1.8 + 2.9 * len(panels), 0.9 + 0.32 * len(names)), layout="compressed")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        for name, (turns, mark) in rows.items():
            row, colour = names.index(name), _BLUE if name == highlighted else _GREY
            axis.barh(row, turns.median, color=colour, height=0.6)
            axis.plot([turns.least, turns.most], [row, row], color="black", lw=1)
            text, place = f"{short(turns.median)} s{mark}", (turns.most, row)
            offset: Any = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
            axis.annotate(text, place, fontsize=9, **offset)
        axis.set_xlim(0, 1.3 * max(turns.most for turns, _ in rows.values()))
        axis.xaxis.set_visible(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=8)
    axes[0].set_yticks(range(len(names)), names, fontsize=10)
    axes[0].tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=_DPI, facecolor="white")
    return written.getvalue()
