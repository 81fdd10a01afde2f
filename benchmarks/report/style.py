"""How pictures look: colours, axes, files for a light page and for any page."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.report.figures import Contender
from benchmarks.report.units import tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

DPI = 120
FAINT = "#8b8b8a"
_SMALL_PRINT = 14
"""Characters in an inch."""
# Okabe and Ito's colours, told apart by the colour-blind; orange and sky blue darker, for white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c58a00", "#3fa0db")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)))
"""After as many contenders as there are colours they begin again, with other lines."""


@dataclass(frozen=True, slots=True)
class Look:
    """A contender's, in every picture."""

    colour: str
    dashes: Any


def available() -> None:
    """Raises ValueError, which says what to install, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("the report needs matplotlib: pip install 'extproc[bench]'") from None


@contextmanager
def drawing() -> Iterator[None]:
    """While pictures are made: a name is text, whatever dollars it has."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):
        yield


def looks(contenders: Sequence[Contender]) -> dict[str, Look]:
    """By name; a reference is drawn in the colour of the text."""
    drawn = [one.name for one in contenders if not one.reference]
    looks = {
        name: Look(_COLOURS[n % len(_COLOURS)], _DASHES[n // len(_COLOURS) % len(_DASHES)])
        for n, name in enumerate(drawn)
    }
    return {one.name: looks.get(one.name, Look("black", (0, (4, 2)))) for one in contenders}


def panels(
    rows: int, columns: int, size: tuple[float, float], **shared: Any
) -> "tuple[Figure, list[Axes]]":
    """A figure of equal panels, row by row; size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(size, layout="compressed")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    return figure, axes


def title(axis: "Axes", text: str, more: str = "") -> None:
    """What is seen, and in small print how to read it."""
    axis.set_title(text, loc="left", fontsize=11, fontweight="bold", pad=22 if more else 8)
    if more:
        axis.annotate(
            more, (0, 1), (0, 6), "axes fraction", "offset points", color=FAINT, fontsize=9
        )


def logarithmic(axis: "XAxis | YAxis") -> None:
    """Ticks of a logarithmic axis of seconds; the fewer decades it has, the more of them."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    decades = np.log10(high / low)
    of_ten = range(1, 10) if decades < 0.6 else (1, 2, 5) if decades < 2.5 else (1,)
    axis.set_major_locator(LogLocator(10, subs=of_ten))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: tick(value))


def few_to_many() -> "Colormap":
    """Colours for counts, seen on black and on white."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"](np.linspace(0.18, 0.92, 256)))


def apart(values: Sequence[float], gap: float, least: float, most: float) -> list[float]:
    """The values moved so little that they are ``gap`` from each other, within the limits where
    there is room; for labels beside lines."""
    order = np.argsort(values)
    placed = np.array(values, dtype=np.float64)[order]
    for n in range(1, len(placed)):
        placed[n] = max(placed[n], placed[n - 1] + gap)
    placed[-1:] = np.minimum(placed[-1:], most)
    for n in range(len(placed) - 2, -1, -1):
        placed[n] = min(placed[n], placed[n + 1] - gap)
    placed += max(least - placed[0], 0.0)
    back = np.empty_like(placed)
    back[order] = placed
    return [float(one) for one in back]


def save(figure: "Figure", path: Path, heading: str, below: Sequence[str]) -> None:
    """A PNG on white that is understood without the page."""
    width = int(figure.get_figwidth() * _SMALL_PRINT)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.supxlabel(
        "\n".join(fill(line, width) for line in below), x=0.01, ha="left", fontsize=8, color=FAINT
    )
    figure.savefig(path, dpi=DPI, facecolor="white")


def svg(figure: "Figure", name: str, alt: str) -> str:
    """For a page of any colour: black becomes that of the page's text. Ids begin with the name, so
    that a page can hold several."""
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, dpi=DPI, metadata=nothing)
    text = written.getvalue()
    text = text[text.index("<svg") :].replace("#000000", "currentColor")
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    size = re.search(r'viewBox="[^"]*"', text)
    assert size
    return (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {size[0]} role="img" '
        f'aria-label="{escape(alt)}" fill="currentColor"' + text[text.index(">") :]
    )
