"""Complete system on loopback: Redis, simulated replicas, pollers, routers and Envoy."""

import asyncio
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import yaml

from extproc.lab.harness.envoy_config import TEMPLATE, Bootstrap, add_access_log, addressed
from extproc.lab.harness.pages import get_json, get_text
from extproc.lab.harness.processes import (
    Check,
    Process,
    answers,
    envoy_command,
    flags,
    pick_ports,
    start_redis,
)
from extproc.lab.harness.traffic import POLICY_HEADER

MODEL = "llama-8b"  # served by every replica

_FLUSH_MS = 100  # interval at which Envoy writes its access log to disk


@dataclass(frozen=True, slots=True)
class SimulatedReplica:
    """Replica of a stack: a process that simulates it, or the running server at ``address``."""

    name: str
    profile: str  # hardware profile of simulation and configuration
    arguments: tuple[str, ...] = ()  # added to the program's command line
    program: tuple[str, ...] = ("extproc", "simulate")  # run by `python -m`
    kv_events_ports: tuple[int, int] | None = None  # for KV events, for their replay
    address: str = ""  # `ip:port` of a server that the stack neither starts nor stops


FLEET = (
    SimulatedReplica("fast-1", "llama-8b-h100"),
    SimulatedReplica("fast-2", "llama-8b-h100"),
    SimulatedReplica("slow-1", "llama-8b-a10"),
    SimulatedReplica("slow-2", "llama-8b-a10"),
)


# Default ports of the programs.
USUAL_PORTS: Mapping[str, int] = MappingProxyType(
    {"envoy": 8080, "envoy-admin": 9901, "router": 50051, "router-admin": 9090}
)


class Stack:
    """Runs the system within an ``async with`` block; the end of the block stops all processes.

    Process names are ``redis``, ``poller``, ``poller-2``, …, ``router``, ``router-2``, …,
    ``envoy``, and the names of the replicas. A restarted process keeps its ports.
    """

    template = TEMPLATE  # Envoy's configuration before addresses are set
    envoy_workers = 2
    logs_accesses = True  # Envoy writes ``access_log``

    def __init__(
        self,
        directory: Path,
        replicas: Sequence[SimulatedReplica] = FLEET,
        settings: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
        usual_ports: Mapping[str, int] = MappingProxyType({}),
        routers: int = 1,
        pollers: int = 1,
    ) -> None:
        """Choose the ports; the system starts on entering the ``async with`` block.

        Args:
            directory: folder of configurations and logs.
            replicas: simulated or running replicas.
            settings: keys of the configuration file, by section.
            usual_ports: preferred ports by name; for a taken port another is chosen.
            routers: number of routers.
            pollers: number of pollers; with 0 there is no Redis, and the router polls by itself.
        """
        self.directory = directory
        self.replicas = replicas
        self.routers = _names("router", routers)
        self.pollers = _names("poller", pollers)
        self._addresses = {replica.name: replica.address for replica in replicas}
        admins = [f"{name}-admin" for name in ("envoy", *self.routers, *self.pollers)]
        names = ["redis", "envoy", *self.routers, *admins, *self.process_names]
        self.ports = pick_ports({**dict.fromkeys(names, 0), **usual_ports})
        self.config_file = directory / "extproc.yaml"
        self.access_log = directory / "access.log"
        self.ready_s = 0.0  # seconds from the start until requests could be routed
        self.url = self._url("envoy")
        self.envoy_admin = self._url("envoy-admin")
        self.router_admin = self.admin("router")
        self.redis_url = f"redis://{self.address('redis')}/0"
        self.names = {self.address(each.name): each.name for each in replicas}  # by `ip:port`
        self._settings = settings
        self._processes: dict[str, Process] = {}
        self._dismissed: set[str] = set()

    @property
    def process_names(self) -> list[str]:
        replicas = [replica.name for replica in self.replicas if not replica.address]
        shared = [*self.pollers, "redis"] if self.pollers else []
        return [*replicas, *self.routers, *shared, "envoy"]

    @property
    def router_command(self) -> str:
        return shlex.join(self._service("router"))

    def command(self, *words: str | Path) -> str:
        """Command line of ``extproc`` with these arguments."""
        return shlex.join(self._command("extproc", *words))

    def admin(self, name: str) -> str:
        return self._url(f"{name}-admin")

    def address(self, name: str) -> str:
        """``ip:port`` of a replica, or of a port of another process, such as ``router-admin``."""
        return self._addresses.get(name) or f"127.0.0.1:{self.ports[name]}"

    def name_of(self, address: str) -> str:
        """Name of the replica at ``ip:port``; the address itself if no replica has it."""
        return self.names.get(address, address)

    def process(self, name: str) -> Process:
        return self._processes[name]

    def ended(self) -> list[Process]:
        """Return the processes that ended by themselves since the last call."""
        ended = [
            process
            for name, process in self._processes.items()
            if name not in self._dismissed and not process.running
        ]
        self._dismissed.update(process.name for process in ended)
        return ended

    def _url(self, name: str) -> str:
        return f"http://{self.address(name)}"

    async def __aenter__(self) -> Self:
        """Start all processes concurrently; return when every replica can get requests."""
        started = time.monotonic()
        self._write_configurations()
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in self.process_names:
                    tasks.create_task(self.start(name))
            await self.wait_routing()
        except BaseException as error:
            await self._stop_all()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        self.ready_s = time.monotonic() - started
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop_all()

    async def start(self, name: str) -> None:
        """Start or restart a process; return when it answers."""
        if name == "redis":
            process = await start_redis(self.directory, self.ports["redis"])
        else:
            argv, ready = self._recipe(name)
            process = await Process.start(
                name, argv, log=self.directory / f"{name}.log", ready=ready
            )
        self._processes[name] = process
        self._dismissed.discard(name)

    async def kill(self, name: str) -> None:
        """End a process with SIGKILL."""
        self._dismissed.add(name)
        await self._processes[name].kill()

    async def stop(self, name: str) -> None:
        """End a process with SIGTERM."""
        self._dismissed.add(name)
        await self._processes[name].stop()

    async def wait_routing(self) -> None:
        """Return when every router knows every replica, and Envoy uses every router."""
        await self._processes["router"].wait_ready(self._routes)

    async def _stop_all(self) -> None:
        self._dismissed.update(self._processes)
        if envoy := self._processes.get("envoy"):
            await envoy.stop()  # first: no other process has to wait for its requests
        await asyncio.gather(*(process.stop() for process in self._processes.values()))

    def _recipe(self, name: str) -> tuple[Sequence[str | Path], Check]:
        """Command line of a process, and the check that tells when the process is ready."""
        if name == "envoy":
            command = envoy_command(self.directory / "envoy.yaml", self.envoy_workers)
            interval = flags({"file-flush-interval-msec": _FLUSH_MS})
            return [*command, *interval], answers(f"{self.envoy_admin}/ready")
        if name in (*self.routers, *self.pollers):
            return self._service(name), answers(f"{self.admin(name)}/healthz")
        replica = next(replica for replica in self.replicas if replica.name == name)
        words = flags({"port": self.ports[name], "model": MODEL, "profile": replica.profile})
        if replica.kv_events_ports:
            words += ["--kv-events-ports", *map(str, replica.kv_events_ports)]
        argv = self._command(*replica.program, *words, *replica.arguments)
        return argv, answers(f"{self._url(name)}/health")

    def _service(self, name: str) -> list[str]:
        command = "serve" if name in self.routers else "poll"
        own = {f"{command}.admin": self.address(f"{name}-admin")}
        if command == "serve":
            own["serve.listen"] = self.address(name)
        shared = self._command("extproc", command, "--config", self.config_file)
        return shared if name in ("router", "poller") else [*shared, *flags(own)]

    def _command(self, *program: str | Path) -> list[str]:
        return [sys.executable, "-m", *map(str, program)]

    def _write_configurations(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(yaml.safe_dump(self._configuration(), sort_keys=False))
        bootstrap = self._bootstrap()
        if self.logs_accesses:
            add_access_log(bootstrap, self.access_log)
        (self.directory / "envoy.yaml").write_text(yaml.safe_dump(bootstrap, sort_keys=False))

    def _bootstrap(self) -> Bootstrap:
        return addressed(
            listen=self.address("envoy"),
            admin=self.address("envoy-admin"),
            routers=map(self.address, self.routers),
            replicas=self.names,
            template=self.template,
        )

    def _configuration(self) -> dict[str, Any]:
        sections: dict[str, dict[str, object]] = {
            "serve": {"listen": self.address("router"), "admin": self.address("router-admin")},
            "route": {"policy_header": POLICY_HEADER},
        }
        if self.pollers:
            sections["redis"] = {"url": self.redis_url}
            sections["poll"] = {"admin": self.address("poller-admin")}
        for name, keys in self._settings.items():
            sections[name] = {**sections.get(name, {}), **keys}
        events = ("kv_events_port", "kv_events_replay_port")
        replicas = [
            {"url": self.address(replica.name), "name": replica.name, "profile": replica.profile}
            | dict(zip(events, replica.kv_events_ports or (), strict=False))
            for replica in self.replicas
        ]
        state = "redis" if self.pollers else "memory"
        return {"replicas": replicas, "state": state, **sections}

    async def _routes(self) -> bool:
        return await self._routers_know_replicas() and await self._envoy_uses_routers()

    async def _routers_know_replicas(self) -> bool:
        for router in self.routers:
            fleet = await get_json(f"{self.admin(router)}/fleet") or {"replicas": ()}
            healthy = {replica["id"] for replica in fleet["replicas"] if replica["healthy"]}
            if healthy != self.names.keys():
                return False
        return True

    async def _envoy_uses_routers(self) -> bool:
        members = await get_text(f"{self.envoy_admin}/clusters") or ""
        return all(
            f"::{self.address(router)}::health_flags::healthy" in members for router in self.routers
        )


def _names(first: str, count: int) -> tuple[str, ...]:
    return (first, *(f"{first}-{number}" for number in range(2, count + 1)))[:count]
