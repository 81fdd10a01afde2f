"""Simulated replicas of a comparison, and the contenders between them and the clients."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.fleet import FleetFile, ReplicaGroup
from benchmarks.processes import get_json, together
from extproc.lab.harness.processes import Process, answers, pick_ports
from extproc.lab.simulator.replica import DEFAULT_MODEL_LEN

_READY_S = 30.0

Servers = Mapping[str, str]  # name → `ip:port`
Processes = Mapping[str, Process]  # the same by name
Requests = Sequence[Mapping[str, Any]]  # as the load client recorded them


class Fleet:
    """Processes of ``extproc simulate``, as a fleet file describes them."""

    model = "llama-8b"

    def __init__(self, file: FleetFile) -> None:
        """Raises ValueError for a file with events: only a simulation plays them."""
        if file.events:
            raise ValueError("its events are played by benchmarks.simulate only: leave them out")
        # Name → hardware profile that a router is told; name → true decode steps a second.
        self.profiles = {name: one.name for name, one in file.believed.items()}
        self.speeds = file.speeds
        # Tokens of a prompt and its answer that every replica takes.
        self.context = min(*(one.kv_tokens for one in file.members.values()), DEFAULT_MODEL_LEN)
        self._options = {
            name: ["--profile", one.name, *_options(file.group(name))]
            for name, one in file.members.items()
        }

    @asynccontextmanager
    async def fresh(self, directory: Path) -> AsyncIterator[tuple[Servers, Processes]]:
        """Starts the replicas anew, or raises ProcessError; logs go to ``directory``."""
        ports = pick_ports(dict.fromkeys(self._options, 0))
        servers = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        simulate = [sys.executable, "-m", "extproc", "simulate", "--model", self.model]
        starting = {
            name: Process.start(
                name,
                [*simulate, "--port", str(port), *self._options[name]],
                log=directory / f"{name}.log",
                ready=answers(f"http://{servers[name]}/health"),
                ready_s=_READY_S,
            )
            for name, port in ports.items()
        }
        async with together(starting) as processes:
            yield servers, processes


def _options(group: ReplicaGroup) -> list[str]:
    options = ["--cold-steps", str(group.cold_steps)]
    options += ["--scheduling-policy", group.scheduling_policy]
    if group.old_counters:
        options.append("--old-counters")
    if group.draft_tokens:
        drafts, acceptance = str(group.draft_tokens), str(group.acceptance)
        options += ["--draft-tokens", drafts, "--acceptance", acceptance]
    return options


async def lateness(servers: Servers) -> dict[str, Any]:
    """Lateness of each replica's steps until now; None for a replica that does not answer."""
    return {
        name: await get_json(f"http://{address}/simulate/late") for name, address in servers.items()
    }


async def no_decisions() -> list[dict[str, Any]]:
    return []


@dataclass(frozen=True, slots=True)
class Front:
    url: str  # where clients send requests
    # Reasons why the contender did not do its own policy for these requests.
    complaints: Callable[[Requests], Awaitable[list[str]]]
    # Decisions made before the requests were sent, as this router's `/decisions` has them.
    decisions: Callable[[], Awaitable[list[dict[str, Any]]]] = no_decisions
    # Processes that a fault may fall on, by the names in `Contender.parts`.
    parts: Mapping[str, Process] = field(default_factory=dict)


class Contender(Protocol):
    name: str  # `kind:policy`, for example `envoy:round_robin`
    about: str  # description in a line
    parts: tuple[str, ...]  # which of `picker`, `poller` and `redis` are processes of its own

    def running(
        self, fleet: Fleet, servers: Servers, directory: Path, seed: int
    ) -> AbstractAsyncContextManager[Front]:
        """Starts it, ready to use every replica; its files go to ``directory``."""
