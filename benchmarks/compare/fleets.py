"""The replicas behind a contender: each begins with them as if they had just been started."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import aiohttp

from benchmarks.fleet import FleetFile, ReplicaGroup
from benchmarks.pages import get_json, get_text
from extproc.demo.ports import pick_ports
from extproc.demo.processes import Process, ProcessError, answers
from extproc.poll.metrics_text import read_metrics
from extproc.simulator.replica import DEFAULT_MODEL_LEN

_READY_S = 30.0
_IDLE_S = 60.0
_CHECK_INTERVAL_S = 0.1

Servers = Mapping[str, str]
"""Name → ``ip:port``."""


class Fleet(Protocol):
    """Where the replicas of each run come from."""

    @property
    def model(self) -> str:
        """The model they serve."""

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer that any of them takes."""

    @property
    def profiles(self) -> Mapping[str, str]:
        """Name → the hardware profile that a router is told it has."""

    @property
    def speeds(self) -> Mapping[str, float]:
        """Name → decode steps a second, which whoever measured the replicas knows."""

    def fresh(self, directory: Path) -> AbstractAsyncContextManager[Servers]:
        """The replicas, running nothing and with empty prefix caches; logs go to ``directory``.

        Raises:
            ProcessError: one does not start, or cannot be emptied.
        """

    async def lateness(self, servers: Servers) -> dict[str, Any]:
        """How late each replica's process delivered its steps until now.

        None for a replica that does not answer; empty where none can tell.
        """


class Simulated:
    """Processes of ``extproc simulate``, started anew for each run."""

    model = "llama-8b"

    def __init__(self, file: FleetFile) -> None:
        """The fleet of a file.

        Raises:
            ValueError: it has events, which only a simulation plays.
        """
        if file.events:
            raise ValueError("its events are played by benchmarks.simulate only: leave them out")
        self.profiles = {name: one.name for name, one in file.believed.items()}
        self.speeds = file.speeds
        self._true = {name: one.name for name, one in file.members.items()}
        self._drafts = {name: _drafts(file.group(name)) for name in file.members}
        least = min(one.kv_tokens for one in file.members.values())
        self.context = min(least, DEFAULT_MODEL_LEN)

    @asynccontextmanager
    async def fresh(self, directory: Path) -> AsyncIterator[Servers]:
        ports = pick_ports(dict.fromkeys(self._true, 0))
        async with AsyncExitStack() as running:

            async def start(name: str) -> None:
                log = directory / f"{name}.log"
                ready = answers(f"http://127.0.0.1:{ports[name]}/health")
                argv = [sys.executable, "-m", "extproc", "simulate", "--model", self.model]
                argv += ["--port", str(ports[name]), "--profile", self._true[name]]
                argv += self._drafts[name]
                process = await Process.start(name, argv, log=log, ready=ready, ready_s=_READY_S)
                await running.enter_async_context(process)

            try:
                async with asyncio.TaskGroup() as tasks:
                    for name in self._true:
                        tasks.create_task(start(name))
            except ExceptionGroup as group:
                raise group.exceptions[0] from None  # one reason is enough
            yield {name: f"127.0.0.1:{port}" for name, port in ports.items()}

    async def lateness(self, servers: Servers) -> dict[str, Any]:
        return {
            name: await get_json(f"http://{address}/simulate/late")
            for name, address in servers.items()
        }


class RealVllm:
    """vLLM servers that run all the time: their starts take minutes. Each run finds them emptied.

    They must have been started with ``VLLM_SERVER_DEV_MODE=1``, which gives them
    ``POST /reset_prefix_cache``.
    """

    def __init__(self, servers: Servers, model: str, context: int, profile: str) -> None:
        self.model = model
        self.context = context
        self.profiles = dict.fromkeys(servers, profile)
        self.speeds = dict.fromkeys(servers, 1.0)
        self._servers = servers

    @classmethod
    async def of(cls, servers: Servers, profile: str) -> Self:
        """Servers alike, which a router is told have this hardware profile.

        Raises:
            ProcessError: the first does not say what it serves.
        """
        url = f"http://{next(iter(servers.values()))}/v1/models"
        if not (page := await get_json(url)):
            raise ProcessError(f"{url} does not answer")
        (served,) = page["data"]
        return cls(servers, served["id"], served["max_model_len"], profile)

    @asynccontextmanager
    async def fresh(self, directory: Path) -> AsyncIterator[Servers]:
        for name, address in self._servers.items():
            await _empty(name, f"http://{address}")
        yield self._servers

    async def lateness(self, servers: Servers) -> dict[str, Any]:
        return {}


def _drafts(group: ReplicaGroup) -> list[str]:
    """What tells ``extproc simulate`` to decode speculatively."""
    if not group.draft_tokens:
        return []
    return ["--draft-tokens", str(group.draft_tokens), "--acceptance", str(group.acceptance)]


async def _empty(name: str, url: str) -> None:
    try:
        async with asyncio.timeout(_IDLE_S):
            while await _busy(name, url):  # noqa: ASYNC110
                await asyncio.sleep(_CHECK_INTERVAL_S)
    except TimeoutError:
        raise ProcessError(f"{name} ({url}) still runs requests after {_IDLE_S:g} s") from None
    if (said := await _reset(url)) != "200":
        raise ProcessError(
            f"{name} ({url}) does not empty its prefix cache: /reset_prefix_cache answered "
            f"{said}; start it with VLLM_SERVER_DEV_MODE=1"
        )


async def _reset(url: str) -> str:
    """The status, or why there is none."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/reset_prefix_cache") as response,
        ):
            return str(response.status)
    except aiohttp.ClientError as error:
        return repr(error)


async def _busy(name: str, url: str) -> bool:
    if not (page := await get_text(f"{url}/metrics")):
        raise ProcessError(f"{name} ({url}) does not answer: /metrics")
    figures = read_metrics(page.encode())
    return figures.running + figures.waiting > 0
