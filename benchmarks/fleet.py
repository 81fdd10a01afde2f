"""Fleet files: which replicas there are, and what happens to them."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from extproc.predict.hardware import HardwareProfile, hardware_profile


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ReplicaGroup(_Part):
    """``count`` replicas alike, called ``name-0``, ``name-1``, …"""

    name: str
    profile: str
    count: int = Field(default=1, ge=1)

    @field_validator("profile")
    @classmethod
    def _exists(cls, name: str) -> str:
        try:
            return hardware_profile(name).name
        except KeyError as error:
            raise ValueError(error.args[0]) from None


class FleetEvent(_Part):
    """Something that happens to one replica."""

    at: float = Field(ge=0)
    """Seconds from the start."""
    replica: str
    slow: float | None = Field(default=None, gt=0)
    """From now on every step takes this many times as long as the profile says."""
    do: Literal["down", "up", "hang"] | None = None


class FleetFile(_Part):
    """A fleet, as a YAML file describes it."""

    replicas: tuple[ReplicaGroup, ...] = Field(min_length=1)
    events: tuple[FleetEvent, ...] = ()

    @property
    def members(self) -> dict[str, HardwareProfile]:
        """Every replica by name."""
        return {
            f"{group.name}-{number}": hardware_profile(group.profile)
            for group in self.replicas
            for number in range(group.count)
        }


def read(path: Path) -> FleetFile:
    """The fleet in a YAML file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not describe a fleet.
    """
    return FleetFile.model_validate(yaml.safe_load(path.read_text()))
