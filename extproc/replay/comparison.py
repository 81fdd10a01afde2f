"""What replays say beside what was recorded, and beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from extproc.predict.inputs import Floats, Indices
from extproc.replay.distribution import FIGURES, distribution
from extproc.replay.play import Played
from extproc.replay.scene import Scene

_MOST_OFF = 0.15
"""Of the 95th percentile of completions: a replay that is further from what happened says
nothing."""
_WARM, _MOST_WARM_S = 0.1, 60.0
"""Share of a record, and seconds, at its beginning and its end of which no figures are made: caches
are empty then, and requests in flight are not in it."""
_BLOCK_S, _LEAST_BLOCKS, _MOST_BLOCKS = 10.0, 10, 100
"""Requests of so many seconds are drawn together: what is near in time is alike."""
_DRAWS = 400
_INTERVAL = 5.0, 95.0
"""Percentiles."""
KINDS = {"ttft_s": "TTFT", "completion_s": "completion"}


@dataclass(frozen=True, slots=True)
class Fit:
    """How far the replay of what happened is from it."""

    recorded: dict[str, float]
    replayed: dict[str, float]
    off: dict[str, float]
    """0.1: 10% too long."""
    request: float
    """Median over the requests, without the sign."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure, with the change and without it, in seconds."""

    before: float
    after: float
    low: float
    high: float
    """Between these is the difference, nine times of ten, if other traffic like this comes."""

    @property
    def seconds(self) -> float:
        """The difference."""
        return self.after - self.before


def recorded(scene: Scene) -> Played:
    """What came of each request in truth."""
    ttft, completion = (np.array([getattr(one, kind) for one in scene.requests]) for kind in KINDS)
    return Played(ttft, completion, [one.replica for one in scene.requests])


def counted(scene: Scene) -> Indices:
    """The requests that figures are made of."""
    at = np.array([one.at for one in scene.requests])
    edge = min(scene.lasts_s * _WARM, _MOST_WARM_S)
    known = np.isfinite(recorded(scene).completion_s)
    return (known & (at >= edge) & (at <= scene.lasts_s - edge)).nonzero()[0]


def fits(scene: Scene, replayed: Played) -> dict[str, Fit]:
    """How far the replay is from what happened.

    Raises:
        ValueError: too far, or there is nothing to tell by.
    """
    found = {}
    truth, among = recorded(scene), counted(scene)
    for kind in KINDS:
        real, ours = (getattr(one, kind)[among] for one in (truth, replayed))
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
    """Why nothing is to be concluded from the replay, and what to do; empty: it is near enough."""
    off = fit["completion_s"].off["p95"]
    if abs(off) <= _MOST_OFF:
        return ""
    return (
        f"the replay of what happened is {off:+.0%} off at the 95th percentile of completions, and "
        f"beyond {_MOST_OFF:.0%} it tells nothing of what would happen. Are the records of all "
        "routers in the folder? Is it longer than some minutes, and did nothing but these routers "
        "send to the replicas?"
    )


def differences(
    scene: Scene, before: Sequence[Played], after: Sequence[Played], random: Random
) -> dict[str, dict[str, Difference]]:
    """Each figure with the change and without; by several runs of each, and a bootstrap over blocks
    of time: the same blocks are drawn of both."""
    among = counted(scene)
    at = np.array([one.at for one in scene.requests])[among]
    blocks = int(min(max((at[-1] - at[0]) / _BLOCK_S, _LEAST_BLOCKS), _MOST_BLOCKS))
    block = np.minimum((at - at[0]) / max(at[-1] - at[0], 1e-9) * blocks, blocks - 1).astype(int)
    members = [(block == number).nonzero()[0] for number in range(blocks)]
    streamed = np.array([one.profile.stream for one in scene.requests])[among]
    found = {}
    for kind in KINDS:
        told = streamed if kind == "ttft_s" else np.ones(len(among), bool)
        if not told.any():
            continue
        pairs = [
            [np.where(told, getattr(one, kind)[among], np.nan) for one in runs]
            for runs in (before, after)
        ]
        drawn = []
        for _ in range(_DRAWS):
            chosen = np.concatenate(random.choices(members, k=blocks))
            without, with_it = (_figures(random.choice(runs)[chosen]) for runs in pairs)
            drawn.append(with_it - without)
        whole = [np.mean([_figures(one) for one in runs], axis=0).tolist() for runs in pairs]
        bounds = np.nanpercentile(drawn, _INTERVAL, axis=0).tolist()
        found[kind] = {
            name: Difference(*each) for name, *each in zip(FIGURES, *whole, *bounds, strict=True)
        }
    return found


def _figures(seconds: Floats) -> Floats:
    known = distribution(seconds[np.isfinite(seconds)])
    return np.array([known[name] for name in FIGURES] if known else [np.nan] * len(FIGURES))
