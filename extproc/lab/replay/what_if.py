"""What would be otherwise: what happened is played first, then what would without and with it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from extproc.lab.replay.comparison import (
    Difference,
    Fit,
    counted,
    differences,
    fits,
    recorded,
    too_short,
)
from extproc.lab.replay.play import Played, play
from extproc.lab.replay.scene import Scene

SEEDS = (0, 1, 2)
"""Of the runs without and with a change."""
Show = Callable[[float], None]
"""Told the share that is done."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What happened, beside its replay."""

    scene: Scene
    requests: int
    """That figures are made of."""
    fits: dict[str, Fit]
    """By kind of time."""
    runs: dict[str, Played]
    """By what they are called, for pictures."""

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "policy": self.scene.config.route.policy,
            "replicas": list(self.scene.names),
            "seconds": self.scene.lasts_s,
            "requests": self.requests,
            "replay": {kind: asdict(fit) for kind, fit in self.fits.items()},
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What would be otherwise with a change."""

    change: str
    """In words."""
    differences: dict[str, dict[str, Difference]]
    """By kind of time, and figure."""
    short: bool
    """The record is, for intervals to be sure."""
    unserved: tuple[float, float]
    """Share of the requests that nobody would serve, without the change and with it."""
    runs: dict[str, Played] = field(default_factory=dict)
    """By what they are called, for pictures."""

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        differing = {
            kind: {name: asdict(one) | {"seconds": one.seconds} for name, one in figures.items()}
            for kind, figures in self.differences.items()
        }
        return {
            "change": self.change,
            "differences": differing,
            "short": self.short,
            "unserved": self.unserved,
        }


def replay(scene: Scene, show: Show) -> Replayed:
    """Plays what happened, each request where it went.

    Raises:
        ValueError: there is nothing to compare it with, or the replicas cannot carry it.
    """
    played = play(scene, SEEDS[0], forced=True, show=show)
    runs = {"recorded": recorded(scene), "replayed": played}
    return Replayed(scene, len(counted(scene)), fits(scene, played), runs)


def what_if(scene: Scene, other: Scene, change: str, show: Show) -> Answer:
    """Plays the scene without a change and with it.

    Raises:
        ValueError: the replicas cannot carry it.
    """
    runs = [(one, seed) for seed in SEEDS for one in (scene, other)]

    def shown(number: int) -> Show:
        return lambda part: show((number + part) / len(runs))

    played = [play(one, seed, show=shown(number)) for number, (one, seed) in enumerate(runs)]
    before, after = played[::2], played[1::2]
    return Answer(
        change,
        differences(scene, before, after),
        too_short(scene, played),
        (_unserved(before), _unserved(after)),
        {"as it is": before[0], "changed": after[0]},
    )


def _unserved(runs: Sequence[Played]) -> float:
    return float(np.isnan([one.completion_s for one in runs]).mean())
