"""What a rule has to say."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """Requests fail, or are not routed."""
    WARNING = "warning"
    """It works, but something is lost or will be."""
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about an Envoy file, or about what runs."""

    rule: str
    """Name of the rule that found it."""
    level: Level
    where: str
    """Path in the file, or what of what runs; empty where all of it is meant."""
    text: str
    """What is so, what comes of it, and what to write."""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{self.level:<8} {place}{self.text}"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Each once, in the order of levels."""
    order = list(Level)
    return sorted(dict.fromkeys(findings), key=lambda finding: order.index(finding.level))
