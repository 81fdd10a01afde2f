"""Picture of the replicas' load over time."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmarks.report.figures import Contender
from benchmarks.report.results import Busy, Event, Run
from benchmarks.report.style import FAINT, few_to_many, panels, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

_MOMENTS = 300
"""Points in time at which the load is drawn."""
_MOST_NAMED = 16
"""Replicas named beside a panel; of more of them every second, third, …"""


def over_time(contenders: Sequence[Contender], events: Sequence[Event]) -> "Figure | None":
    """Requests on each replica, a row each; the first turn of each contender."""
    from matplotlib.ticker import LogLocator

    runs = [(one.name, min(one.runs, key=lambda run: run.run.repeat)) for one in contenders]
    replicas = sorted({name for _, run in runs for name in _replicas(run)}, key=_natural)
    if not replicas:
        return None
    end = max(_end(run) for _, run in runs)
    loads = [_load(run, replicas, end) for _, run in runs]
    most = max(float(load.max()) for load in loads)
    height = 1.1 + len(runs) * (0.55 + 0.16 * min(max(len(replicas), 3), _MOST_NAMED))
    figure, axes = panels(len(runs), 1, (10.0, height), sharex=True)
    for axis, (name, _), load in zip(axes, runs, loads, strict=True):
        mesh = _panel(axis, load, end, most)
        every = -(-len(replicas) // _MOST_NAMED)
        axis.set_yticks(np.arange(0, len(replicas), every) + 0.5, replicas[::every], fontsize=8)
        title(axis, name)
        for event in (one for one in events if one.at_s <= end):
            axis.axvline(event.at_s, color=FAINT, linestyle=":", lw=1)
    axes[-1].set_xlabel("seconds from the start" + _told(events, end))
    bar = figure.colorbar(mesh, ax=axes, label="requests on the replica", aspect=30, pad=0.02)
    bar.ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.minorticks_off()
    return figure


def in_flight(run: Run, replica: str, times: Floats) -> Floats:
    """Requests that were sent to a replica and had not ended, at points in time."""
    here = [one for one in run.requests if one.replica == replica and one.lasted_s is not None]
    came = np.sort([one.sent_s for one in here])
    left = np.sort([one.sent_s + (one.lasted_s or 0.0) for one in here])
    gone = np.searchsorted(left, times, side="right")
    return (np.searchsorted(came, times, side="right") - gone).astype(np.float64)


def _panel(axis: "Axes", load: Floats, end: float, most: float) -> "QuadMesh":
    from matplotlib.colors import LogNorm

    edges = np.linspace(0.0, end, load.shape[1] + 1)
    mesh = axis.pcolormesh(
        edges,
        np.arange(len(load) + 1),
        np.ma.masked_less(load, 0.5),
        norm=LogNorm(1, max(most, 2.0)),
        cmap=few_to_many(),
        rasterized=True,
    )
    axis.invert_yaxis()
    return mesh


def _load(run: Run, replicas: Sequence[str], end: float) -> Floats:
    """Requests by replica and moment: as sampled, else worked out from the requests."""
    width = end / _MOMENTS
    times = np.linspace(width / 2, end - width / 2, _MOMENTS)
    of = _sampled if run.load else in_flight
    return np.stack([of(run, replica, times) for replica in replicas])


def _sampled(run: Run, replica: str, times: Floats) -> Floats:
    """As the last sample before each point in time says."""
    at = np.array([_at(sample) for sample in run.load])
    busy = [_busy(sample.get(replica)) for sample in run.load]
    index = np.searchsorted(at, times, side="right") - 1
    return np.where(index < 0, 0.0, np.array(busy)[np.maximum(index, 0)])


def _busy(sampled: float | Busy | None) -> float:
    return sampled.running + sampled.waiting if isinstance(sampled, Busy) else 0.0


def _at(sample: dict[str, float | Busy]) -> float:
    at = sample.get("at_s", 0.0)
    return at if isinstance(at, float) else 0.0


def _replicas(run: Run) -> set[str]:
    sampled = {name for sample in run.load for name in sample if name != "at_s"}
    return sampled or {one.replica for one in run.requests if one.replica}


def _end(run: Run) -> float:
    ends = [one.sent_s + (one.lasted_s or 0.0) for one in run.requests]
    return max([*ends, *map(_at, run.load), 1e-3])


def _natural(name: str) -> list[tuple[int, str]]:
    """a-2 before a-10."""
    return [
        (int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)
    ]


def _told(events: Sequence[Event], end: float) -> str:
    shown = [f"{one.at_s:g} s: {one.text}" for one in events if one.at_s <= end]
    return f"\ndotted — {'; '.join(shown[:6])}{' …' if len(shown) > 6 else ''}" if shown else ""
