"""Processes of a measurement: how they start, what they use of the machine, and their HTTP
pages."""

import asyncio
import json
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.processes import Process
from extproc.lab.harness.stack import SimulatedReplica, Stack

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_FILES = 10_240  # open files where the limit is infinite: macOS refuses more
_ROUTING_FILTERS = ("local_ratelimit", "set_filter_state", "ext_proc", "buffer")
_PAGE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


@asynccontextmanager
async def together(
    starting: Mapping[str, Awaitable[Process]], stop_s: float = 5.0
) -> AsyncIterator[dict[str, Process]]:
    """Starts processes and returns them by name once all are ready. Stops all if one of them
    fails."""
    async with AsyncExitStack() as running:

        async def start(process: Awaitable[Process]) -> Process:
            started = await process
            running.push_async_callback(started.stop, stop_s)
            return started

        try:
            async with asyncio.TaskGroup() as tasks:
                started = {
                    name: tasks.create_task(start(process)) for name, process in starting.items()
                }
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first reason is enough
        yield {name: task.result() for name, task in started.items()}


class AttachedStack(Stack):
    """Redis, poller, router and Envoy for servers that run already and are not stopped."""

    def __init__(
        self,
        directory: Path,
        servers: Mapping[str, str],
        profiles: Mapping[str, str],
        settings: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
    ) -> None:
        """``servers`` has the ``ip:port``, ``profiles`` the hardware profile of each replica."""
        replicas = [SimulatedReplica(name, profiles[name]) for name in servers]
        self._servers = servers
        super().__init__(directory, replicas, settings)

    def address(self, name: str) -> str:
        return self._servers.get(name) or super().address(name)

    async def start(self, name: str) -> None:
        if name not in self._servers:
            await super().start(name)


def drop_ext_proc(bootstrap: Bootstrap) -> None:
    """Removes ext_proc and the filters that depend on its answer."""
    filters = manager_of(bootstrap)["http_filters"]
    filters[:] = [
        entry for entry in filters if entry["name"].rpartition(".")[2] not in _ROUTING_FILTERS
    ]


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used (Linux)."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * _TICK_S


def memory_kb(pid: int) -> float:
    """Resident memory of a process (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return float(line.split()[1])


def allow_many_connections() -> None:
    """Raises the limit of open files: each request in flight needs a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    files = max(soft, _FILES) if hard == resource.RLIM_INFINITY else hard
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


async def get_text(url: str) -> str:
    """Text at a URL; empty if there is none."""
    try:
        async with (
            aiohttp.ClientSession(timeout=_PAGE_TIMEOUT) as session,
            session.get(url) as response,
        ):
            return await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""


async def get_json(url: str) -> Any:
    """JSON at a URL; None if there is none."""
    return json.loads(await get_text(url) or "null")


async def get_samples(url: str) -> list[Sample]:
    """Metrics at a URL; empty if there are none."""
    families = text_string_to_metric_families(await get_text(url))
    return [sample for family in families for sample in family.samples]


async def decisions(admin: str, after: int = 0) -> list[dict[str, Any]]:
    """Records of a router's decisions after the decision ``after``, as far as the router still has
    them."""
    records: list[dict[str, Any]] = []
    while page := await get_json(f"{admin}/decisions?after={after}"):
        records += page
        after = page[-1]["number"]
    return records
