"""Comparison of a replay with the record, and of replays without and with a change."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from extproc.lab.replay.figures import FIGURES, distribution
from extproc.lab.replay.play import Played
from extproc.lab.replay.scene import Scene
from extproc.predict.inputs import Floats, Indices

_MOST_OFF = 0.15  # largest error of a replay that `too_far` accepts
_EDGE, _LONGEST_EDGE_S = 0.1, 60.0
"""Figures exclude this share of the record at each end, but at most this many seconds: caches are
empty at first, and the record lacks requests in flight at either end."""
_PARTS, _STUDENT = 3, 2.92
"""Number of parts into which the jackknife cuts a record, and quantile of Student's t (two degrees
of freedom) for an interval with 90% confidence. More parts would depend on each other, because
queues last longer than a part: if half an hour at 85% load is cut into ten parts, a quarter of the
intervals miss the true difference."""
_SHORTEST_PART = 10.0  # least length of a part ÷ 95th percentile of completions
KINDS = {"ttft_s": "TTFT", "completion_s": "completion"}


@dataclass(frozen=True, slots=True)
class Fit:
    """Mean and percentiles of a time in a record and in its replay, and the replay's errors."""

    recorded: dict[str, float]
    replayed: dict[str, float]
    off: dict[str, float]  # relative error of each figure; 0.1: 10% too long
    request: float  # median of |relative error| over single requests


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean or percentile of a time without and with a change, in seconds."""

    before: float
    after: float
    seconds: float  # `after` − `before`
    low: float
    high: float  # `low` to `high`: interval of the difference with 90% confidence


def counted(scene: Scene, kind: str = "completion_s") -> Indices:
    """Return the indices of the requests that figures of this kind count: completed and refused
    requests, except near both ends of the record. Figures of TTFT count only streams."""
    at = _times(scene)
    edge = min(scene.lasts_s * _EDGE, _LONGEST_EDGE_S)
    seen = [
        (isfinite(each.completion_s) or not each.replica)
        and (each.profile.stream or kind != "ttft_s")
        for each in scene.requests
    ]
    return (np.array(seen) & (at >= edge) & (at <= scene.lasts_s - edge)).nonzero()[0]


def fits(scene: Scene, replayed: Played) -> dict[str, Fit]:
    """Return the errors of a replay, for TTFT and for the completion.

    Raises:
        ValueError: no completed request is far enough from the ends of the record.
    """
    found = {}
    for kind in KINDS:
        among = counted(scene, kind)
        real = np.array([getattr(each, kind) for each in scene.requests])[among]
        played = getattr(replayed, kind)[among]
        both = np.isfinite(real) & np.isfinite(played)
        expected, actual = distribution(real[both]), distribution(played[both])
        if expected and actual:
            off = {name: actual[name] / expected[name] - 1.0 for name in FIGURES}
            request = float(np.median(np.abs(played[both] / real[both] - 1.0)))
            found[kind] = Fit(expected, actual, off, request)
    if "completion_s" not in found:
        raise ValueError("the record has no request with a recorded end: record for longer")
    return found


def too_far(fit: dict[str, Fit]) -> str:
    """Return why a replay is too far from its record, and the remedy; empty if it is close."""
    completion = fit["completion_s"]
    off = {
        "at the median of completions": completion.off["p50"],
        "at the 95th percentile of completions": completion.off["p95"],
        "at half of the requests or more": completion.request,
    }
    where = max(off, key=lambda name: abs(off[name]))
    if abs(off[where]) <= _MOST_OFF:
        return ""
    return (
        f"the replay differs from the record by {off[where]:+.0%} {where}: beyond "
        f"{_MOST_OFF:.0%} a change cannot be predicted. Check that the folder has the records of "
        "all routers over more than a few minutes, that only these routers send requests to the "
        "replicas, and that each replica has a machine to itself"
    )


def too_short(scene: Scene, runs: Sequence[Played]) -> bool:
    """Return True if the parts into which the record is cut are too short to be independent."""
    among = counted(scene)
    longest_s = np.nanpercentile([run.completion_s[among] for run in runs], 95)
    return bool(np.ptp(_times(scene)[among]) < _PARTS * _SHORTEST_PART * longest_s)


def differences(
    scene: Scene, before: Sequence[Played], after: Sequence[Played]
) -> dict[str, dict[str, Difference]]:
    """Compare times without and with a change; a jackknife gives bounds for each difference."""
    found = {}
    for kind in KINDS:
        among = counted(scene, kind)
        if not len(among):
            continue
        at = _times(scene)[among]
        part = np.digitize(at, np.linspace(at[0], at[-1], _PARTS + 1)[1:-1])
        without, changed = (
            np.array([getattr(run, kind)[among] for run in runs]) for runs in (before, after)
        )
        figures = _figures(without), _figures(changed)
        difference = figures[1] - figures[0]
        remaining = [part != number for number in range(_PARTS)]
        partial = [_figures(changed[:, rest]) - _figures(without[:, rest]) for rest in remaining]
        squares = np.square(np.array(partial) - difference).sum(axis=0)
        bound = _STUDENT * np.sqrt(squares * (_PARTS - 1) / _PARTS)
        rows = np.transpose([*figures, difference, difference - bound, difference + bound]).tolist()
        found[kind] = {name: Difference(*row) for name, row in zip(FIGURES, rows, strict=True)}
    return found


def _times(scene: Scene) -> Floats:
    return np.array([request.at for request in scene.requests])


def _figures(seconds: Floats) -> Floats:
    found = distribution(seconds[np.isfinite(seconds)])
    return np.array([found[name] for name in FIGURES] if found else [np.nan] * len(FIGURES))
