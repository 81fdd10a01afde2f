"""Findings of ``extproc check``, on an Envoy file or on running parts."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity, the worst first."""

    ERROR = "error"  # requests fail, or the router does not route them
    WARNING = "warning"  # requests are served, but something is lost, now or later
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one rule at one place."""

    rule: str
    level: Level
    where: str  # path in the file, or the name of a running part; empty: the whole file
    text: str  # problem, consequence, remedy

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{self.level:<8} {place}{self.text}"


def failed(findings: Iterable[Finding]) -> bool:
    """Return True if there is an error among the findings."""
    return any(finding.level is Level.ERROR for finding in findings)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by level and drop duplicates."""
    order = list(Level)
    return sorted(dict.fromkeys(findings), key=lambda finding: order.index(finding.level))
