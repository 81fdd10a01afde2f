"""What stands between clients and replicas."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.compare.fleets import Fleet, Servers

Requests = Sequence[Mapping[str, Any]]
"""As the load client recorded them."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a router said of a request before it was sent; seconds."""

    ttft_s: float | None
    completion_s: float | None
    replica: str
    """``ip:port``"""


class Front(Protocol):
    """A contender that runs."""

    @property
    def url(self) -> str:
        """Where clients send requests."""

    async def complaints(self, requests: Requests) -> list[str]:
        """Why this was not the contender at work, after the requests; empty where it was."""

    async def predictions(self) -> dict[str, Prediction]:
        """By request id; empty where it predicts nothing."""


class Contender(Protocol):
    """One way to spread requests over replicas."""

    name: str
    """``kind:policy``, for example ``envoy:round_robin``."""
    about: str
    """What it is, in a line."""

    def running(
        self, fleet: Fleet, servers: Servers, directory: Path, seed: int
    ) -> AbstractAsyncContextManager[Front]:
        """Started, and ready to use every replica; logs and configurations go to ``directory``.

        Raises:
            ProcessError: it does not start, or does not get ready.
        """
