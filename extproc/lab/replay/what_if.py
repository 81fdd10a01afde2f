"""Replays of a record: as recorded, and then without and with a change."""

from collections.abc import Callable, Sequence
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

_LONGEST_WAIT_S = 300.0  # at the router, if the change turns queueing on
SEEDS = (0, 1, 2)  # of the runs without and with a change
_COLUMNS = [Column(name) for name in FIGURES]
Show = Callable[[float], None]  # called with the share of the work that is done


@dataclass(frozen=True, slots=True)
class Change:
    """Changes to a record, all made in one replay."""

    policy: str = ""
    more: Sequence[str] = ()  # names of replicas to copy
    less: Sequence[str] = ()  # names of replicas to remove
    hardware: Sequence[tuple[str, str]] = ()  # names of replicas with their new profiles
    traffic: float = 1.0  # factor of the request rate
    hold: bool | None = None  # True: requests may wait at the router; None: as recorded

    def __str__(self) -> str:
        parts = [
            f"policy {self.policy}" if self.policy else "",
            *(f"one more like {name}" for name in self.more),
            *(f"without {name}" for name in self.less),
            *(f"{name} on {profile}" for name, profile in self.hardware),
            f"{self.traffic:g}× the traffic" if self.traffic != 1.0 else "",
            "" if self.hold is None else "queue on" if self.hold else "queue off",
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class Replayed:
    """Replay of a record, with its errors against the record."""

    scene: Scene
    requests: int  # served requests that figures count
    refused: int  # refused requests, which only the figures of a change count
    fits: dict[str, Fit]  # by kind of time

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.scene.config.route.policy,
            "replicas": list(self.scene.names),
            "seconds": self.scene.lasts_s,
            "requests": self.requests,
            "refused": self.refused,
            "replay": {kind: asdict(fit) for kind, fit in self.fits.items()},
        }

    def __str__(self) -> str:
        scene, rows = self.scene, list[list[str]]()
        for kind, fit in self.fits.items():
            rows += [
                [f"{KINDS[kind]} recorded", *map(figure, fit.recorded.values())],
                ["  replayed", *map(figure, fit.replayed.values())],
                ["  off by", *(f"{off:+.1%}" for off in fit.off.values())],
            ]
        request = self.fits["completion_s"].request
        names, policy = ", ".join(scene.names), scene.config.route.policy
        head = (
            f"{self.requests} requests of {scene.lasts_s / 60:.1f} min on {len(scene.replicas)} "
            f"replicas ({names}), policy {policy}; "
            f"the replayed completions are off by {request:.1%} in the median"
        )
        if self.refused:
            head += f"\n{self.refused} more were refused; a change is predicted with them"
        columns = [Column("seconds since sent", left=True), *_COLUMNS]
        return "\n".join([head, "", *table(columns, rows)])


@dataclass(frozen=True, slots=True)
class ChangeEffect:
    """Effect of a change on TTFT and completion."""

    change: str  # in words
    differences: dict[str, dict[str, Difference]]  # by kind of time, and figure
    short: bool  # the record is too short for reliable bounds
    unserved: tuple[float, float]  # share of requests that no replica serves: unchanged, changed

    def __str__(self) -> str:
        rows = list[list[str]]()
        for kind, figures in self.differences.items():
            each = [figures[name] for name in FIGURES]
            rows += [
                [f"{KINDS[kind]} as it is", *(figure(found.before) for found in each)],
                ["  changed", *(figure(found.after) for found in each)],
                ["  difference", *(f"{found.seconds:+.3g}" for found in each)],
                ["  90% between", *(f"{found.low:+.3g} and {found.high:+.3g}" for found in each)],
            ]
        columns = [Column("seconds", left=True), *_COLUMNS]
        lines = [f"with {self.change}", "", *table(columns, rows)]
        if any(self.unserved):
            shares = "{:.1%} as it is, {:.1%} changed".format(*self.unserved)
            lines += ["", f"requests without a replica: {shares}; the figures exclude them"]
        if self.short:
            lines += [
                "",
                "the bounds are unreliable: a third of the record is shorter than ten times the "
                "95th percentile of completions; record for longer",
            ]
        return "\n".join(lines)


def changed(scene: Scene, change: Change) -> Scene:
    """Return the scene with a change.

    Raises:
        ValueError: a name is unknown, a replica is removed twice, or no replica is left.
    """
    replicas = dict(scene.replicas)
    for name, profile in change.hardware:
        address = _address(scene, name)
        replicas[address] = replicas[address].on(*_hardware(scene, profile))
    for name in change.more:
        address = _address(scene, name)
        copy = f"{address}+{len(replicas)}"
        replicas[copy] = replicas[address].with_state(id=copy)
    for name in change.less:
        if replicas.pop(_address(scene, name), None) is None:
            raise ValueError(f"replica {name!r} cannot be removed twice")
    departed = scene.replicas.keys() - scene.present.values()
    if not replicas.keys() - departed:
        raise ValueError("no replica is left")
    config = scene.config
    route, hold = config.route, config.hold
    if change.policy:
        route = route.model_copy(update={"policy": change.policy})
    if change.hold is not None:
        longest_s = (hold.longest_s or _LONGEST_WAIT_S) if change.hold else 0.0
        hold = hold.model_copy(update={"longest_s": longest_s})
    rate = change.traffic
    for address, replica in replicas.items():
        phases = tuple(replace(phase, at=phase.at / rate) for phase in replica.phases)
        replicas[address] = replace(replica, phases=phases)
    return replace(
        scene,
        config=config.model_copy(update={"route": route, "hold": hold}),
        replicas=replicas,
        requests=[replace(request, at=request.at / rate) for request in scene.requests],
        lasts_s=scene.lasts_s / rate,
    )


def replay(scene: Scene, show: Show) -> Replayed:
    """Play each request on its recorded replica. Raises ValueError if the replicas are overloaded,
    or if no completed request is far enough from the ends of the record."""
    played = play(scene, SEEDS[0], forced=True, show=show)
    among = counted(scene)
    refused = sum(not scene.requests[index].replica for index in among.tolist())
    return Replayed(scene, len(among) - refused, refused, fits(scene, played))


def what_if(scene: Scene, other: Scene, change: str, show: Show) -> ChangeEffect:
    """Play a scene and ``other``, the changed scene; ``change`` says in words what was changed.

    Raises:
        ValueError: replicas are overloaded.
    """
    runs = [(variant, seed) for seed in SEEDS for variant in (scene, other)]

    def part(number: int) -> Show:
        return lambda share: show((number + share) / len(runs))

    played = [play(*run, show=part(number)) for number, run in enumerate(runs)]
    before, after = played[::2], played[1::2]
    return ChangeEffect(
        change,
        differences(scene, before, after),
        too_short(scene, played),
        (_unserved(before), _unserved(after)),
    )


def _unserved(runs: Sequence[Played]) -> float:
    return float(np.isnan([run.completion_s for run in runs]).mean())


def _address(scene: Scene, name: str) -> str:
    known = scene.names
    if name not in known and name not in scene.replicas:
        raise ValueError(f"the record has no replica {name!r}; its replicas: {', '.join(known)}")
    return known.get(name, name)


def _hardware(scene: Scene, name: str) -> tuple[HardwareProfile, StepModel | None]:
    """Hardware and learned step times of a recorded replica with this profile; if there is none,
    the profile's hardware and None."""
    profile = hardware_profile(name)
    for replica in scene.replicas.values():
        if replica.state.profile == name:
            return replica.hardware, replica.phases[-1].step
    return profile, None
