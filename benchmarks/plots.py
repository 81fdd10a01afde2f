"""Pictures of a comparison, for people who never saw the project."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.fleet import FleetEvent
from benchmarks.served import Failed, Served
from extproc.fleet.view import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GRID = 400
"""Points in time at which the load is drawn."""
_MOST_DOTS = 4000
"""Requests drawn one by one; more of them would be one blot."""
_MOST_NAMED = 12
"""Replicas named in a legend."""


@dataclass(frozen=True, slots=True)
class Plotted:
    """One run, as the pictures need it."""

    label: str
    replicas: Sequence[str]
    served: Sequence[Served]
    failed: Sequence[Failed]


def available() -> None:
    """Raises ValueError, which says what to install, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'extproc[bench]'") from None


def draw(
    runs: Sequence[Plotted], events: Iterable[FleetEvent], title: str, folder: Path
) -> list[Path]:
    """Writes ``latency.png``, ``load.png`` and ``prediction.png`` into a folder, made if need be.

    Raises:
        OSError: they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "latency": _latency(runs),
        "load": _load(runs, list(events)),
        "prediction": _prediction([run for run in runs if run.label != "oracle"]),
    }
    paths = []
    for name, figure in figures.items():
        figure.suptitle(f"{figure.get_suptitle()}\n{title}", fontsize=11)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _latency(runs: Sequence[Plotted]) -> "Figure":
    """Share of requests that took at most so long."""
    figure, axes = _panels(1, 2, (12.0, 5.0))
    figure.suptitle("How long requests take: share of requests done within a time")
    for axis, what in zip(axes, ("time to first token", "completion"), strict=True):
        for run in runs:
            seconds = np.sort([_measured(one, what) for one in run.served])
            share = np.arange(1, len(seconds) + 1) / len(seconds)
            style: dict[str, Any] = (
                {"color": "black", "linestyle": "--"} if run.label == "oracle" else {}
            )
            # The tail is where policies differ: distance from 100% on a log scale.
            axis.plot(seconds, 1 - share + 1 / len(seconds), label=run.label, lw=1.6, **style)
        axis.set(xscale="log", yscale="log", xlabel=f"{what}, seconds")
        axis.set_ylim(1.0, 1e-3)
        axis.set_yticks([1, 0.5, 0.1, 0.05, 0.01, 0.001])
        axis.set_yticklabels(["0%", "50%", "90%", "95%", "99%", "99.9%"])
        axis.minorticks_off()
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("requests that took at most this long")
    axes[1].legend(title="policy (further left is better)", loc="upper left")
    return figure


def _load(runs: Sequence[Plotted], events: Sequence[FleetEvent]) -> "Figure":
    """Requests on each replica over time."""
    figure, axes = _panels(len(runs), 1, (12.0, 1.5 + 2.5 * len(runs)))
    figure.suptitle("Requests in flight on each replica (each policy has a scale of its own)")
    for axis, run in zip(axes, runs, strict=True):
        for replica in run.replicas:
            times, load = _in_flight(run, replica)
            axis.plot(times, load, lw=1.0, label=replica)
        end = _end(run)
        for event in (one for one in events if one.at <= end):
            axis.axvline(event.at, color="grey", linestyle=":", lw=0.8)
        axis.set_title(run.label, loc="left", fontsize=10)
        axis.set_ylabel("requests")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("seconds from the start; dotted: something happens to a replica")
    if len(runs[0].replicas) <= _MOST_NAMED:
        axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    return figure


def _prediction(runs: Sequence[Plotted]) -> "Figure":
    """What was predicted when a request came, beside what it took."""
    figure, axes = _panels(1, len(runs), (1.0 + 5.0 * len(runs), 5.4), share_y=True)
    figure.suptitle("When a request would be complete: predicted as it came, beside what it took")
    for axis, run in zip(axes, runs, strict=True):
        shown = run.served[:: len(run.served) // _MOST_DOTS + 1]
        predicted = [one.decision.predicted_completion for one in shown]
        actual = [one.completion for one in shown]
        axis.scatter(actual, predicted, s=4, alpha=0.25, linewidths=0)
        ends = np.array([min(actual) / 1.5, max(actual) * 1.5])
        axis.plot(ends, ends, color="black", lw=1, label="as predicted")
        for factor, label in ((2.0, "off by 2×"), (0.5, None)):
            axis.plot(ends, ends * factor, color="grey", lw=0.8, linestyle="--", label=label)
        axis.set(xscale="log", yscale="log", xlabel="actual, seconds")
        axis.set_title(run.label, fontsize=10)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("predicted, seconds")
    axes[0].legend(loc="upper left")
    return figure


def _panels(
    rows: int, columns: int, size: tuple[float, float], share_y: bool = False
) -> "tuple[Figure, list[Axes]]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex="col", sharey=share_y)
    return figure, list(grid.flat)


def _measured(one: Served, what: str) -> float:
    return one.completion if what == "completion" else one.ttft


def _end(run: Plotted) -> float:
    return max(one.finished or 0.0 for one in run.served)


def _in_flight(run: Plotted, replica: str) -> tuple[Floats, Floats]:
    """Requests on a replica at points in time: those that came, less those that left."""
    here = [(one.traced.at, one.finished) for one in run.served if one.replica == replica]
    here += [(one.traced.at, one.at) for one in run.failed if one.replica == replica]
    came, left = (np.sort(np.array(times, dtype=np.float64)) for times in _columns(here))
    times = np.linspace(0.0, _end(run), _GRID)
    gone = np.searchsorted(left, times, side="right").astype(np.float64)
    return times, np.searchsorted(came, times, side="right") - gone


def _columns(pairs: list[tuple[float, float | None]]) -> tuple[list[float], list[float]]:
    return [came for came, _ in pairs], [left or 0.0 for _, left in pairs]
