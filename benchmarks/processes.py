"""Processes of a measurement: starting several, their use of the machine, their open files."""

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from extproc.lab.harness.processes import Process

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_FILES = 10_240  # asked for where a process may have any number: more is refused on macOS


@asynccontextmanager
async def together(
    starting: Mapping[str, Awaitable[Process]], stop_s: float = 5.0
) -> AsyncIterator[dict[str, Process]]:
    """Those that start, by name, once all are ready; each has ``stop_s`` seconds to end.

    Raises:
        ProcessError: one does not start. None is left.
    """
    async with AsyncExitStack() as running:

        async def start(process: Awaitable[Process]) -> Process:
            started = await process
            running.push_async_callback(started.stop, stop_s)
            return started

        try:
            async with asyncio.TaskGroup() as tasks:
                each = {name: tasks.create_task(start(one)) for name, one in starting.items()}
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # one reason is enough
        yield {name: task.result() for name, task in each.items()}


def cpu_s(pid: int) -> float:
    """Seconds of CPU that it has used (Linux)."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * _TICK_S


def memory_kb(pid: int) -> float:
    """Its resident memory (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return float(line.split()[1])


def allow_many_connections() -> None:
    """Raises the limit of open files: each request in flight is one."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if few == resource.RLIM_INFINITY:
        return
    files = max(few, _FILES) if most == resource.RLIM_INFINITY else most
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
