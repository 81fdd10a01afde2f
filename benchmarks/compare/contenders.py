"""Replicas of a comparison, and contenders: the routers between clients and replicas."""

import asyncio
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
from extproc.lab.harness.processes import Process, ProcessError, flags
from extproc.lab.harness.stack import MODEL, SimulatedReplica, Stack
from extproc.lab.simulator.replica import DEFAULT_MODEL_LEN

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

    model = MODEL

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
        self._replicas = [
            SimulatedReplica(name, profile.name, _options(file.group(name)))
            for name, profile in file.members.items()
        ]

    @asynccontextmanager
    async def fresh(self, directory: Path) -> AsyncIterator[tuple[Servers, Processes]]:
        async with _ReplicaStack(directory, self._replicas) as stack:
            names = stack.process_names
            yield (
                {name: stack.address(name) for name in names},
                {name: stack.process(name) for name in names},
            )


class _ReplicaStack(Stack):
    """Stack of simulated replicas without the other processes."""

    @property
    def process_names(self) -> list[str]:
        return [replica.name for replica in self.replicas]

    async def wait_routing(self) -> None:
        """Returns at once: a replica is ready when its process has started."""


def _options(group: ReplicaGroup) -> tuple[str, ...]:
    options: dict[str, object] = {
        "cold-steps": group.cold_steps,
        "scheduling-policy": group.scheduling_policy,
    }
    if group.draft_tokens:
        options |= {"draft-tokens": group.draft_tokens, "acceptance": group.acceptance}
    counters = ("--old-counters",) if group.old_counters else ()
    return *flags(options), *counters


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
