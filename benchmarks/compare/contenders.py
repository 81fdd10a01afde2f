"""What stands between clients and replicas."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.compare.fleets import Fleet, Servers
from extproc.lab.harness.processes import Process

Requests = Sequence[Mapping[str, Any]]  # as the load client recorded them


async def no_decisions() -> list[dict[str, Any]]:
    return []


@dataclass(frozen=True, slots=True)
class Front:
    url: str  # where clients send requests
    complaints: Callable[[Requests], Awaitable[list[str]]]
    """Why this was not the contender at work, after the requests; empty where it was."""
    decisions: Callable[[], Awaitable[list[dict[str, Any]]]] = no_decisions
    """What it said of each request before it was sent, as this router's ``/decisions`` has it."""
    parts: Mapping[str, Process] = field(default_factory=dict)
    """Those a fault may fall on, by the names in ``Contender.parts``."""


class Contender(Protocol):
    name: str  # `kind:policy`, for example `envoy:round_robin`
    about: str  # what it is, in a line
    parts: tuple[str, ...]
    """Which of ``picker``, ``poller`` and ``redis`` it has, each a process of its own."""

    def running(
        self, fleet: Fleet, servers: Servers, directory: Path, seed: int
    ) -> AbstractAsyncContextManager[Front]:
        """Started, and ready to use every replica; logs and configurations go to ``directory``.

        Raises:
            ProcessError: it does not start, or does not get ready.
        """
