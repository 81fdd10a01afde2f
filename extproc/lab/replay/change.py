"""What is to be otherwise in a scene."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from extproc.lab.replay.scene import Member, Scene
from extproc.predict.step import HardwareProfile, StepModel, hardware_profile

_HELD_S = 300.0  # seconds for which requests wait where that is new


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be otherwise; all of it at once."""

    policy: str = ""
    more: Sequence[str] = ()  # replicas of which there is one more, by name
    less: Sequence[str] = ()  # those that are not there
    hardware: Sequence[tuple[str, str]] = ()
    """Replicas, and the profile of what they run on instead."""
    traffic: float = 1.0  # how many times as many requests come
    hold: bool | None = None  # whether requests wait at the router; None: as they do

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


def changed(scene: Scene, change: Change) -> Scene:
    """The scene as it is to be.

    Raises:
        ValueError: a replica or a profile does not exist, or none is left.
    """
    members = dict(scene.members)
    for name, profile in change.hardware:
        replica = _named(scene, name)
        members[replica] = members[replica].on(*_hardware(scene, profile))
    times = Counter[str]()
    for name in change.more:
        replica = _named(scene, name)
        times[replica] += 1
        other = f"{replica}+{times[replica]}"
        members[other] = members[replica].called(other, f"{name}+{times[replica]}")
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
        members={name: _sooner(member, faster) for name, member in members.items()},
        requests=[replace(one, at=one.at / faster) for one in scene.requests],
        lasts_s=scene.lasts_s / faster,
    )


def _sooner(member: Member, times: float) -> Member:
    return replace(member, turns=tuple(replace(one, at=one.at / times) for one in member.turns))


def _named(scene: Scene, name: str) -> str:
    known = scene.names
    if name not in known and name not in scene.members:
        raise ValueError(f"the record has no replica {name!r}, but {', '.join(known)}")
    return known.get(name, name)


def _hardware(scene: Scene, name: str) -> tuple[HardwareProfile, StepModel | None]:
    """That hardware, as it was learned to be where a replica of the record runs on it."""
    profile = hardware_profile(name)
    alike = [one for one in scene.members.values() if one.state.profile == name]
    return (alike[0].hardware, alike[0].turns[-1].step) if alike else (profile, None)
