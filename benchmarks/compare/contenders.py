"""Replicas of a comparison, and contenders: the routers between clients and replicas."""

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from benchmarks.arguments import servers_by_name
from benchmarks.fleet import FleetFile, ReplicaGroup
from extproc.lab.harness.processes import Process, ProcessError, answers, pick_ports, together
from extproc.lab.simulator.replica import DEFAULT_MODEL_LEN

_READY_S = 30.0

Servers = Mapping[str, str]  # name → `ip:port`
Processes = Mapping[str, Process]  # by name
Requests = Sequence[Mapping[str, Any]]  # records of the load client


class ComparedFleet(ABC):
    """Replicas of a comparison, the same for every contender and run."""

    model: str  # served by all replicas
    profiles: Mapping[str, str]  # hardware profiles in the router's configuration, by replica
    speeds: Mapping[str, float]  # true decode speeds by replica, in any unit; empty if unknown
    load_options: Sequence[str]  # of the load client

    @abstractmethod
    def fresh(self, directory: Path) -> AbstractAsyncContextManager[tuple[Servers, Processes]]:
        """Provides replicas without cached prefixes; raises ProcessError if that fails."""


class RunningServers(ComparedFleet):
    """vLLM servers that run already, in development mode."""

    def __init__(
        self, addresses: Sequence[str], model: str, profile: str, speeds: Sequence[float]
    ) -> None:
        """Raises ValueError if there are speeds, but not one for each address."""
        self.model = model
        self._servers = servers_by_name(addresses)
        self.profiles = dict.fromkeys(self._servers, profile)
        self.speeds = dict(zip(self._servers, speeds, strict=True)) if speeds else {}
        self.load_options = ("--known-lengths",)

    @asynccontextmanager
    async def fresh(self, directory: Path) -> AsyncIterator[tuple[Servers, Processes]]:
        await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
        async with aiohttp.ClientSession() as session:
            for address in self._servers.values():
                async with session.post(f"http://{address}/reset_prefix_cache") as answer:
                    if answer.status != HTTPStatus.OK:
                        raise ProcessError(
                            f"{address} answers {answer.status} to /reset_prefix_cache: "
                            "start vLLM with VLLM_SERVER_DEV_MODE=1"
                        )
        yield self._servers, {}


class SimulatedFleet(ComparedFleet):
    """Processes of ``extproc simulate``, as a fleet file describes them."""

    model = "llama-8b"

    def __init__(self, file: FleetFile) -> None:
        """Raises ValueError for a file with events, which only the discrete simulation can play."""
        if file.events:
            raise ValueError(
                "remove the events of the fleet: only benchmarks.simulate plays events"
            )
        self.profiles = {name: profile.name for name, profile in file.believed.items()}
        self.speeds = file.speeds
        # Tokens of a prompt and its answer that fit into every replica.
        kv_tokens = (profile.kv_tokens for profile in file.members.values())
        self.load_options = ("--context", str(min(*kv_tokens, DEFAULT_MODEL_LEN)))
        self._options = {
            name: ["--profile", profile.name, *_options(file.group(name))]
            for name, profile in file.members.items()
        }

    @asynccontextmanager
    async def fresh(self, directory: Path) -> AsyncIterator[tuple[Servers, Processes]]:
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


@dataclass(frozen=True, slots=True)
class Front:
    url: str  # of the contender, for its clients
    # Reasons why the contender did not apply its own policy to these requests.
    complaints: Callable[[Requests], Awaitable[list[str]]]
    # Records of this router's decisions, in the form of `/decisions`; None for other routers.
    decisions: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None
    # Processes that a fault may hit, by the names in `Contender.parts`.
    parts: Mapping[str, Process] = field(default_factory=dict)


class Contender(Protocol):
    name: str  # `kind:policy`, for example `envoy:round_robin`
    about: str  # description in one line
    parts: tuple[str, ...]  # those of `picker`, `poller` and `redis` that it runs

    def running(
        self, fleet: ComparedFleet, servers: Servers, directory: Path, seed: int
    ) -> AbstractAsyncContextManager[Front]:
        """Starts the contender and waits until it uses every replica; its files go to
        ``directory``."""
