"""Replays of a record: first as it was, then without and with a change."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from extproc.ground.text import Column, figure, table
from extproc.lab.replay.comparison import (
    KINDS,
    Difference,
    Fit,
    counted,
    differences,
    fits,
    too_short,
)
from extproc.lab.replay.figures import FIGURES
from extproc.lab.replay.play import Played, play
from extproc.lab.replay.scene import Scene
from extproc.predict.step import HardwareProfile, StepModel, hardware_profile

_HELD_S = 300.0  # seconds for which requests wait where that is new
SEEDS = (0, 1, 2)  # of the runs without and with a change
_COLUMNS = [Column(name) for name in FIGURES]
Show = Callable[[float], None]  # told the share that is done


@dataclass(frozen=True, slots=True)
class Change:
    """Changes to a record, all made at once."""

    policy: str = ""
    more: Sequence[str] = ()  # replicas of which there is one more, by name
    less: Sequence[str] = ()  # replicas that are removed
    hardware: Sequence[tuple[str, str]] = ()  # replicas, and the profiles they get
    traffic: float = 1.0  # factor of the rate of requests
    hold: bool | None = None  # requests wait at the router; None: as recorded

    def __str__(self) -> str:
        parts = [
            f"policy {self.policy}" if self.policy else "",
            *(f"one more like {name}" for name in self.more),
            *(f"without {name}" for name in self.less),
            *(f"{name} on {profile}" for name, profile in self.hardware),
            f"{self.traffic:g}× the traffic" if self.traffic != 1.0 else "",
            "" if self.hold is None else "holding on" if self.hold else "holding off",
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class Replayed:
    """Recorded requests beside their replay."""

    scene: Scene
    requests: int  # that figures are made of
    fits: dict[str, Fit]  # by kind of time

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.scene.config.route.policy,
            "replicas": list(self.scene.names),
            "seconds": self.scene.lasts_s,
            "requests": self.requests,
            "replay": {kind: asdict(fit) for kind, fit in self.fits.items()},
        }

    def __str__(self) -> str:
        scene, rows = self.scene, list[list[str]]()
        for kind, fit in self.fits.items():
            rows.append([f"{KINDS[kind]} recorded", *map(figure, fit.recorded.values())])
            rows.append(["  replayed", *map(figure, fit.replayed.values())])
            rows.append(["  off by", *(f"{off:+.1%}" for off in fit.off.values())])
        request = self.fits["completion_s"].request
        names, policy = ", ".join(scene.names), scene.config.route.policy
        head = (
            f"{self.requests} requests of {scene.lasts_s / 60:.1f} min on {len(scene.members)} "
            f"replicas ({names}), policy {policy}; the median completion is off by {request:.1%}"
        )
        columns = [Column("seconds since sent", left=True), *_COLUMNS]
        return "\n".join([head, "", *table(columns, rows)])


@dataclass(frozen=True, slots=True)
class ChangeEffect:
    """Figures with and without a change."""

    change: str  # in words
    differences: dict[str, dict[str, Difference]]  # by kind of time, and figure
    short: bool  # the record is too short for sure intervals
    unserved: tuple[float, float]  # share of requests without a replica, before and after

    def to_json(self) -> dict[str, Any]:
        differing = {
            kind: {name: asdict(one) | {"seconds": one.seconds} for name, one in figures.items()}
            for kind, figures in self.differences.items()
        }
        return asdict(self) | {"differences": differing}

    def __str__(self) -> str:
        columns = [Column("seconds", left=True), *_COLUMNS]
        lines = [f"with {self.change}", "", *table(columns, list(self._rows()))]
        if any(self.unserved):
            left = "{:.1%} as it is, {:.1%} changed".format(*self.unserved)
            what = f"nobody would serve {left} of all requests"
            lines += ["", f"{what}; the figures are of the others"]
        if self.short:
            lines += [
                "",
                "it is less sure than that: a third of the record is not ten times as long as the "
                "95th percentile of completions: record for longer",
            ]
        return "\n".join(lines)

    def _rows(self) -> Iterator[list[str]]:
        for kind, figures in self.differences.items():
            each = [figures[name] for name in FIGURES]
            yield [f"{KINDS[kind]} as it is", *(figure(one.before) for one in each)]
            yield ["  changed", *(figure(one.after) for one in each)]
            yield ["  difference", *(f"{one.seconds:+.3g}" for one in each)]
            yield ["  90% between", *(f"{one.low:+.3g} and {one.high:+.3g}" for one in each)]


def changed(scene: Scene, change: Change) -> Scene:
    """Scene with a change; raises ValueError for unknown names, or if no replica is left."""
    members = dict(scene.members)
    for name, profile in change.hardware:
        replica = _named(scene, name)
        members[replica] = members[replica].on(*_hardware(scene, profile))
    times = Counter[str]()
    for name in change.more:
        replica = _named(scene, name)
        times[replica] += 1
        other, called = f"{replica}+{times[replica]}", f"{name}+{times[replica]}"
        members[other] = members[replica].with_state(id=other, name=called)
    for name in change.less:
        members.pop(_named(scene, name), None)
    if not members:
        raise ValueError("no replica is left")
    faster = change.traffic
    config = scene.config
    route, hold = config.route, config.hold
    if change.policy:
        route = route.model_copy(update={"policy": change.policy})
    if change.hold is not None:
        longest_s = (hold.longest_s or _HELD_S) if change.hold else 0.0
        hold = hold.model_copy(update={"longest_s": longest_s})
    return replace(
        scene,
        config=config.model_copy(update={"route": route, "hold": hold}),
        members={
            name: replace(one, turns=tuple(replace(at, at=at.at / faster) for at in one.turns))
            for name, one in members.items()
        },
        requests=[replace(one, at=one.at / faster) for one in scene.requests],
        lasts_s=scene.lasts_s / faster,
    )


def replay(scene: Scene, show: Show) -> Replayed:
    """Plays the record, each request where it went; raises ValueError if that fails."""
    played = play(scene, SEEDS[0], forced=True, show=show)
    return Replayed(scene, len(counted(scene)), fits(scene, played))


def what_if(scene: Scene, other: Scene, change: str, show: Show) -> ChangeEffect:
    """Plays the scene without a change and with it; raises ValueError if that fails."""
    runs = [(one, seed) for seed in SEEDS for one in (scene, other)]

    def shown(number: int) -> Show:
        return lambda part: show((number + part) / len(runs))

    played = [play(one, seed, show=shown(number)) for number, (one, seed) in enumerate(runs)]
    before, after = played[::2], played[1::2]
    return ChangeEffect(
        change,
        differences(scene, before, after),
        too_short(scene, played),
        (_unserved(before), _unserved(after)),
    )


def _unserved(runs: Sequence[Played]) -> float:
    return float(np.isnan([one.completion_s for one in runs]).mean())


def _named(scene: Scene, name: str) -> str:
    known = scene.names
    if name not in known and name not in scene.members:
        raise ValueError(f"the record has no replica {name!r}, but {', '.join(known)}")
    return known.get(name, name)


def _hardware(scene: Scene, name: str) -> tuple[HardwareProfile, StepModel | None]:
    """Hardware of a name, as learned if a replica of the record runs on it."""
    profile = hardware_profile(name)
    alike = [one for one in scene.members.values() if one.state.profile == name]
    return (alike[0].hardware, alike[0].turns[-1].step) if alike else (profile, None)
