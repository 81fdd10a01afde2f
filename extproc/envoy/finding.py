"""Findings on an Envoy file, or on what runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity, the worst first."""

    ERROR = "error"  # requests fail, or are not routed
    WARNING = "warning"  # something is lost or will be
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one rule for one place."""

    rule: str
    level: Level
    where: str  # path in the file, or the part of what runs; empty where all of it is meant
    text: str  # what is so, what comes of it, and what to write

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{self.level:<8} {place}{self.text}"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorts findings by level, and drops repeated ones."""
    order = list(Level)
    return sorted(dict.fromkeys(findings), key=lambda finding: order.index(finding.level))
