"""The replicas behind a contender: each begins with processes that were just started."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.fleet import FleetFile, ReplicaGroup
from benchmarks.pages import get_json
from extproc.demo.ports import pick_ports
from extproc.demo.processes import Process, answers
from extproc.simulator.replica import DEFAULT_MODEL_LEN

_READY_S = 30.0

Servers = Mapping[str, str]
"""Name → ``ip:port``."""


class Fleet:
    """Processes of ``extproc simulate``, as a fleet file describes them."""

    model = "llama-8b"

    def __init__(self, file: FleetFile) -> None:
        """The fleet of a file.

        Raises:
            ValueError: it has events, which only a simulation plays.
        """
        if file.events:
            raise ValueError("its events are played by benchmarks.simulate only: leave them out")
        self.profiles = {name: one.name for name, one in file.believed.items()}
        """Name → the hardware profile that a router is told it has."""
        self.speeds = file.speeds
        """Name → decode steps a second, which whoever measured the replicas knows."""
        least = min(one.kv_tokens for one in file.members.values())
        self.context = min(least, DEFAULT_MODEL_LEN)
        """Most tokens of a prompt and its answer that any of them takes."""
        self._options = {
            name: ["--profile", one.name, *_drafts(file.group(name))]
            for name, one in file.members.items()
        }

    @asynccontextmanager
    async def fresh(self, directory: Path) -> AsyncIterator[Servers]:
        """The replicas, started anew; logs go to ``directory``.

        Raises:
            ProcessError: one does not start.
        """
        ports = pick_ports(dict.fromkeys(self._options, 0))
        async with AsyncExitStack() as running:

            async def start(name: str) -> None:
                log = directory / f"{name}.log"
                ready = answers(f"http://127.0.0.1:{ports[name]}/health")
                argv = [sys.executable, "-m", "extproc", "simulate", "--model", self.model]
                argv += ["--port", str(ports[name]), *self._options[name]]
                process = await Process.start(name, argv, log=log, ready=ready, ready_s=_READY_S)
                await running.enter_async_context(process)

            try:
                async with asyncio.TaskGroup() as tasks:
                    for name in self._options:
                        tasks.create_task(start(name))
            except ExceptionGroup as group:
                raise group.exceptions[0] from None  # one reason is enough
            yield {name: f"127.0.0.1:{port}" for name, port in ports.items()}


async def lateness(servers: Servers) -> dict[str, Any]:
    """How late each replica delivered its steps until now; None for one that does not answer."""
    return {
        name: await get_json(f"http://{address}/simulate/late") for name, address in servers.items()
    }


def _drafts(group: ReplicaGroup) -> list[str]:
    """What tells ``extproc simulate`` to decode speculatively."""
    if not group.draft_tokens:
        return []
    return ["--draft-tokens", str(group.draft_tokens), "--acceptance", str(group.acceptance)]
