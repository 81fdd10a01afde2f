"""Fleet files, which list replicas and events, and the imbalance of requests on a fleet."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from benchmarks.trace import first_problem
from extproc.ground.yaml_file import read_yaml
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.features import ACCEPTANCE, LoadedAdapters, Speculation
from extproc.predict.step import HardwareProfile, StepModel, hardware_profile

Action = Literal["down", "up", "hang"]

_BATCH, _CONTEXT_TOKENS = 16, 1200  # sequences and KV tokens of each, in the step of :func:`speed`

Stay = tuple[str, float, float]  # replica, start and end of a request in seconds


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ReplicaGroup(_Section):
    """Equal replicas, called ``name-0``, ``name-1``, …"""

    name: str
    profile: str
    count: int = Field(default=1, ge=1)
    believed: str | None = None  # profile in the router's configuration; None: the true one
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    draft_tokens: int = Field(default=0, ge=0)  # per sequence and step
    acceptance: float = Field(default=ACCEPTANCE, ge=0, le=1)
    """Probability that a drafted token is accepted if all tokens before it are."""
    cold_steps: int = Field(default=0, ge=0)  # first steps of a process, which take longer
    old_counters: bool = False  # counters as of vLLM up to 0.15
    prefix_caching: bool = True
    max_loras: int = Field(default=0, ge=0)  # LoRA adapters in a batch; 0: no adapter is served
    adapter_load_s: float = Field(default=0.1, ge=0)

    @field_validator("profile", "believed")
    @classmethod
    def _exists(cls, name: str | None) -> str | None:
        return name and hardware_profile(name).name

    @model_validator(mode="after")
    def _drafts_fit(self) -> Self:
        Engine(hardware_profile(self.profile), speculation=self.speculation(Random(0)))
        return self

    def speculation(self, random: Random) -> Speculation | None:
        drafts = self.draft_tokens
        return Speculation(drafts, self.acceptance, random) if drafts else None

    def adapters(self) -> LoadedAdapters | None:
        return LoadedAdapters(self.max_loras, self.adapter_load_s) if self.max_loras else None


class FleetEvent(_Section):
    """Event of a replica: ``{at: 600, replica: a-0, slow: 3}``, or ``down``, ``up`` or ``hang``
    instead of ``slow: 3``."""

    at: float = Field(ge=0)  # seconds from the start
    replica: str
    slow: float | None = Field(default=None, gt=0)  # factor of every step's time; 1: as usual
    do: Action | None = None
    """``down`` ends the process and loses its work. ``hang`` stops steps and answers. ``up`` ends
    both: after ``down`` the engine is empty, after ``hang`` it continues."""

    @model_validator(mode="before")
    @classmethod
    def _bare_word(cls, fields: Any) -> Any:
        """Reads ``{…, down}``, which YAML takes for a key without a value."""
        if not isinstance(fields, dict):
            return fields
        bare = {key for key in ("down", "up", "hang") if fields.get(key, "") in (None, True)}
        rest = {key: value for key, value in fields.items() if key not in bare}
        return rest if not bare else rest | {"do": " and ".join(sorted(bare))}

    @model_validator(mode="after")
    def _has_single_action(self) -> Self:
        if (self.slow is None) == (self.do is None):
            raise ValueError("an event needs exactly one of slow, down, up and hang")
        return self


class FleetFile(_Section):
    replicas: tuple[ReplicaGroup, ...] = Field(min_length=1)
    events: tuple[FleetEvent, ...] = ()

    @field_validator("replicas")
    @classmethod
    def _names_differ(cls, groups: tuple[ReplicaGroup, ...]) -> tuple[ReplicaGroup, ...]:
        names = [group.name for group in groups]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two groups are called {name!r}")
        return groups

    @model_validator(mode="after")
    def _events_of_members(self) -> Self:
        for event in self.events:
            if event.replica not in self.members:
                known = ", ".join(self.members)
                raise ValueError(f"no replica is called {event.replica!r}; there are: {known}")
        return self

    @property
    def believed(self) -> dict[str, HardwareProfile]:
        """Profiles that the router is configured with, by replica."""
        groups = ((name, self.group(name)) for name in self.members)
        return {name: hardware_profile(of.believed or of.profile) for name, of in groups}

    def group(self, name: str) -> ReplicaGroup:
        return next(group for group in self.replicas if name.rpartition("-")[0] == group.name)

    @property
    def members(self) -> dict[str, HardwareProfile]:
        return {
            f"{group.name}-{number}": hardware_profile(group.profile)
            for group in self.replicas
            for number in range(group.count)
        }

    @property
    def speeds(self) -> dict[str, float]:
        """Decode steps per second, by the name of the replica."""
        return {name: speed(profile.step) for name, profile in self.members.items()}


def read(path: Path) -> FleetFile:
    """Reads the fleet of a YAML file. Raises OSError, or ValueError with a one-line message that
    names the file."""
    try:
        return FleetFile.model_validate(read_yaml(path))
    except ValidationError as error:
        problem = first_problem(error)
    except ValueError as error:
        problem = str(error)
    raise ValueError(f"{path}: {problem}")


def speed(step: StepModel) -> float:
    """Decode steps per second that these step times give."""
    return 1 / step.step_time(prefill=0, batch=_BATCH, kv=_BATCH * _CONTEXT_TOKENS)


def imbalance(stays: Iterable[Stay], speeds: Mapping[str, float]) -> float | None:
    """Requests on the busiest replica ÷ its fair share of all requests, in proportion to speed.

    Mean over time, weighted by the requests in flight at each moment: 1 if requests are always
    spread in proportion to the speeds; None without requests.
    """
    rows = {name: row for row, name in enumerate(speeds)}
    changes = sorted(
        change
        for replica, start, end in stays
        if replica in rows
        for change in ((start, 1, rows[replica]), (end, -1, rows[replica]))
    )
    if not changes:
        return None
    at, change, row = np.array(changes).T
    steps = np.zeros((len(at), len(rows)))
    steps[np.arange(len(at)), row.astype(int)] = change
    in_flight, seconds = steps.cumsum(axis=0)[:-1], np.diff(at)
    share = np.array([*speeds.values()]) / sum(speeds.values())
    return float(seconds @ (in_flight / share).max(axis=1) / (seconds @ in_flight.sum(axis=1)))
