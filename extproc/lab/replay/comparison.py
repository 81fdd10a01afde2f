"""Comparison of replays with the record, and with each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from extproc.lab.replay.figures import FIGURES, distribution
from extproc.lab.replay.play import Played
from extproc.lab.replay.scene import Scene
from extproc.predict.inputs import Floats, Indices

_MOST_OFF = 0.15  # error of a replay in the median, the 95th percentile and the median request
_WARM, _MOST_WARM_S = 0.1, 60.0
"""Share of a record, and seconds, that are left out at both ends: caches are empty at first, and
requests in flight are not in the record."""
_PARTS, _STUDENT = 3, 2.92
"""Parts of a record, one of which is left out at a time, and standard errors that contain nine of
ten values (Student's t of two degrees of freedom). More parts depend on each other if a queue lasts
for minutes: with ten, on half an hour at 85% load, the truth is outside every fourth time."""
_PART = 10.0  # times the 95th percentile of completions that each part should last
KINDS = {"ttft_s": "TTFT", "completion_s": "completion"}


@dataclass(frozen=True, slots=True)
class Fit:
    """Error of the replay of a record."""

    recorded: dict[str, float]
    replayed: dict[str, float]
    off: dict[str, float]  # 0.1: 10% too long
    request: float  # median of the requests' absolute errors


@dataclass(frozen=True, slots=True)
class Difference:
    """Figure without a change and with it, in seconds."""

    before: float
    after: float
    low: float
    high: float  # the difference is between these in nine of ten records like this one

    @property
    def seconds(self) -> float:
        return self.after - self.before


def recorded(scene: Scene) -> Played:
    """Recorded times of the requests since they were sent."""
    ttft, completion = (np.array([getattr(one, kind) for one in scene.requests]) for kind in KINDS)
    return Played(ttft, completion, [one.replica for one in scene.requests])


def counted(scene: Scene, kind: str = "completion_s") -> Indices:
    """Requests that count for figures of a kind."""
    at = _times(scene)
    edge = min(scene.lasts_s * _WARM, _MOST_WARM_S)
    seen = np.isfinite(recorded(scene).completion_s)
    if kind == "ttft_s":
        seen &= np.array([one.profile.stream for one in scene.requests])
    return (seen & (at >= edge) & (at <= scene.lasts_s - edge)).nonzero()[0]


def fits(scene: Scene, replayed: Played) -> dict[str, Fit]:
    """Errors of the replay by kind of time; raises ValueError without any recorded completion."""
    found, truth = {}, recorded(scene)
    for kind in KINDS:
        real, ours = (getattr(one, kind)[counted(scene, kind)] for one in (truth, replayed))
        both = np.isfinite(real) & np.isfinite(ours)
        theirs, mine = distribution(real[both]), distribution(ours[both])
        if theirs and mine:
            off = {name: mine[name] / theirs[name] - 1.0 for name in FIGURES}
            request = float(np.median(np.abs(ours[both] / real[both] - 1.0)))
            found[kind] = Fit(theirs, mine, off, request)
    if "completion_s" not in found:
        raise ValueError("the record holds no request whose end was seen: record for longer")
    return found


def too_far(fit: dict[str, Fit]) -> str:
    """Reason why the replay says nothing, and remedy; empty if it is near enough."""
    ours = fit["completion_s"]
    off = {
        "at the median of completions": ours.off["p50"],
        "at the 95th percentile of completions": ours.off["p95"],
        "at half of the requests or more": ours.request,
    }
    where = max(off, key=lambda name: abs(off[name]))
    if abs(off[where]) <= _MOST_OFF:
        return ""
    return (
        f"the replay of what happened is {off[where]:+.0%} off {where}, and beyond "
        f"{_MOST_OFF:.0%} it tells nothing of what would happen. Are the records of all routers in "
        "the folder? Is it longer than some minutes, and did nothing but these routers send to the "
        "replicas, each of which has a machine of its own?"
    )


def too_short(scene: Scene, runs: Sequence[Played]) -> bool:
    """True if parts of the record are too short to be independent."""
    among = counted(scene)
    longest = np.nanpercentile([one.completion_s[among] for one in runs], 95)
    return bool(np.ptp(_times(scene)[among]) < _PARTS * _PART * longest)


def differences(
    scene: Scene, before: Sequence[Played], after: Sequence[Played]
) -> dict[str, dict[str, Difference]]:
    """Figures of all runs without and with a change, bounded by the jackknife over parts."""
    found = {}
    for kind in KINDS:
        among = counted(scene, kind)
        if not len(among):
            continue
        at = _times(scene)[among]
        part = np.digitize(at, np.linspace(at[0], at[-1], _PARTS + 1)[1:-1])
        without, with_it = (
            np.array([getattr(one, kind)[among] for one in runs]) for runs in (before, after)
        )
        whole = _figures(without), _figures(with_it)
        difference = whole[1] - whole[0]
        others = [part != number for number in range(_PARTS)]
        changes = [_figures(with_it[:, few]) - _figures(without[:, few]) for few in others]
        squares = np.square(np.array(changes) - difference).sum(axis=0)
        bound = _STUDENT * np.sqrt(squares * (_PARTS - 1) / _PARTS)
        every = np.transpose([*whole, difference - bound, difference + bound]).tolist()
        found[kind] = {name: Difference(*each) for name, each in zip(FIGURES, every, strict=True)}
    return found


def _times(scene: Scene) -> Floats:
    return np.array([one.at for one in scene.requests])


def _figures(seconds: Floats) -> Floats:
    told = distribution(seconds[np.isfinite(seconds)])
    return np.array([told[name] for name in FIGURES] if told else [np.nan] * len(FIGURES))
