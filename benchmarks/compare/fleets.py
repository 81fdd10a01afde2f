"""The replicas behind a contender: each begins with processes that were just started."""

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.fleet import FleetFile, ReplicaGroup
from benchmarks.pages import get_json
from benchmarks.processes import together
from extproc.lab.harness.ports import pick_ports
from extproc.lab.harness.processes import Process, answers
from extproc.lab.simulator.replica import DEFAULT_MODEL_LEN

_READY_S = 30.0

Servers = Mapping[str, str]  # name → `ip:port`
Processes = Mapping[str, Process]  # the same by name


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
    async def fresh(self, directory: Path) -> AsyncIterator[tuple[Servers, Processes]]:
        """The replicas, started anew; logs go to ``directory``.

        Raises:
            ProcessError: one does not start.
        """
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


async def lateness(servers: Servers) -> dict[str, Any]:
    """How late each replica delivered its steps until now; None for one that does not answer."""
    return {
        name: await get_json(f"http://{address}/simulate/late") for name, address in servers.items()
    }


def _drafts(group: ReplicaGroup) -> list[str]:
    if not group.draft_tokens:
        return []
    return ["--draft-tokens", str(group.draft_tokens), "--acceptance", str(group.acceptance)]
