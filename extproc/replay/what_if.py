"""What would be otherwise: what happened is played first, then what would without and with it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np

from extproc.replay.change import Change, changed
from extproc.replay.comparison import Difference, Fit, counted, differences, fits, recorded
from extproc.replay.play import Played, play
from extproc.replay.scene import Scene

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

    change: Change
    differences: dict[str, dict[str, Difference]]
    """By kind of time, and figure."""
    unserved: tuple[int, int]
    """Requests that nobody would serve, without the change and with it, in the mean of the runs."""
    runs: dict[str, Played] = field(default_factory=dict)
    """By what they are called, for pictures."""

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        differing = {
            kind: {name: asdict(one) | {"seconds": one.seconds} for name, one in figures.items()}
            for kind, figures in self.differences.items()
        }
        return {"change": str(self.change), "differences": differing, "unserved": self.unserved}


def replay(scene: Scene, show: Show) -> Replayed:
    """Plays what happened, each request where it went.

    Raises:
        ValueError: there is nothing to compare it with.
    """
    played = play(scene, SEEDS[0], forced=True, show=show)
    runs = {"recorded": recorded(scene), "replayed": played}
    return Replayed(scene, len(counted(scene)), fits(scene, played), runs)


def what_if(scene: Scene, change: Change, show: Show) -> Answer:
    """Plays the scene without a change and with it.

    Raises:
        ValueError: there can be no such change.
    """
    each = scene, changed(scene, change)
    played: list[list[Played]] = [[], []]
    for number, seed in enumerate(SEEDS):
        for place, one in enumerate(each):
            done = 2 * number + place
            played[place].append(
                play(one, seed, show=lambda part, done=done: show((done + part) / 2 / len(SEEDS)))  # type: ignore[misc]
            )
    before, after = played
    unserved = [
        round(float(np.mean([np.isnan(one.completion_s).sum() for one in runs]))) for runs in played
    ]
    return Answer(
        change,
        differences(scene, before, after, Random(SEEDS[0])),
        (unserved[0], unserved[1]),
        {"as it is": before[0], "changed": after[0]},
    )
