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
"""Of median and 95th percentile of completions: a replay that is further from what happened says
nothing."""
_GATES = {"p50": "median", "p95": "95th percentile"}
_WARM, _MOST_WARM_S = 0.1, 60.0
"""Share of a record, and seconds, at its beginning and its end of which no figures are made: caches
are empty then, and requests in flight are not in it."""
_LEAST_BLOCK_S, _BLOCK = 10.0, 10.0
"""Seconds of traffic that are drawn together, and how many times the 95th percentile of completions
at least: a queue is remembered for longer than a request lasts."""
FEW_BLOCKS = 10
"""Of fewer no interval is wide enough."""
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
    """Between these it is in nine of ten draws from the record."""

    @property
    def seconds(self) -> float:
        """The difference."""
        return self.after - self.before


def recorded(scene: Scene) -> Played:
    """What came of each request in truth, since it was sent."""
    ttft, completion = (np.array([getattr(one, kind) for one in scene.requests]) for kind in KINDS)
    return Played(ttft, completion, [one.replica for one in scene.requests])


def counted(scene: Scene, kind: str = "completion_s") -> Indices:
    """The requests that figures of that kind are made of."""
    at = _times(scene)
    edge = min(scene.lasts_s * _WARM, _MOST_WARM_S)
    seen = np.isfinite(recorded(scene).completion_s)
    if kind == "ttft_s":
        seen &= np.array([one.profile.stream for one in scene.requests])
    return (seen & (at >= edge) & (at <= scene.lasts_s - edge)).nonzero()[0]


def fits(scene: Scene, replayed: Played) -> dict[str, Fit]:
    """How far the replay is from what happened.

    Raises:
        ValueError: there is nothing to tell by.
    """
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
    """Why nothing is to be concluded from the replay, and what to do; empty: it is near enough."""
    off = fit["completion_s"].off
    name = max(_GATES, key=lambda name: abs(off[name]))
    if abs(off[name]) <= _MOST_OFF:
        return ""
    return (
        f"the replay of what happened is {off[name]:+.0%} off at the {_GATES[name]} of "
        f"completions, and beyond {_MOST_OFF:.0%} it tells nothing of what would happen. Are the "
        "records of all routers in the folder? Is it longer than some minutes, and did nothing but "
        "these routers send to the replicas?"
    )


def blocks(scene: Scene, runs: Sequence[Played]) -> int:
    """How many stretches of time there are that hardly depend on each other; at least two."""
    at, among = _times(scene), counted(scene)
    longest = np.nanpercentile([one.completion_s[among] for one in runs], 95)
    return max(int(np.ptp(at[among]) / max(_BLOCK * longest, _LEAST_BLOCK_S)), 2)


def differences(
    scene: Scene, before: Sequence[Played], after: Sequence[Played], count: int, random: Random
) -> dict[str, dict[str, Difference]]:
    """Each figure with the change and without; by several runs of each, and a bootstrap over so
    many blocks of time: the same blocks and the same run are drawn of both."""
    found = {}
    for kind in KINDS:
        among = counted(scene, kind)
        if not len(among):
            continue
        at = _times(scene)[among]
        block = np.digitize(at, np.linspace(at[0], at[-1], count + 1)[1:-1])
        members = [(block == number).nonzero()[0] for number in range(count)]
        pairs = [
            [getattr(one, kind)[among] for one in each] for each in zip(before, after, strict=True)
        ]
        drawn = []
        for _ in range(_DRAWS):
            chosen = np.concatenate(random.choices(members, k=count))
            without, with_it = (_figures(one[chosen]) for one in random.choice(pairs))
            drawn.append(with_it - without)
        whole = np.mean([[_figures(one) for one in pair] for pair in pairs], axis=0).tolist()
        bounds = np.nanpercentile(drawn, _INTERVAL, axis=0).tolist()
        found[kind] = {
            name: Difference(*each) for name, *each in zip(FIGURES, *whole, *bounds, strict=True)
        }
    return found


def _times(scene: Scene) -> Floats:
    return np.array([one.at for one in scene.requests])


def _figures(seconds: Floats) -> Floats:
    told = distribution(seconds[np.isfinite(seconds)])
    return np.array([told[name] for name in FIGURES] if told else [np.nan] * len(FIGURES))
