"""Whole system on loopback: Redis, simulated replicas, poller, router and Envoy."""

import asyncio
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import aiohttp
import yaml

from extproc.lab.harness.envoy_config import Bootstrap, add_access_log, addressed
from extproc.lab.harness.processes import (
    Check,
    Process,
    answers,
    envoy_command,
    pick_ports,
    start_redis,
)
from extproc.lab.harness.traffic import POLICY_HEADER

MODEL = "llama-8b"  # what every replica serves

_ENVOY_WORKERS = 2
_FLUSH_MS = 100  # Envoy writes its access log out this often


@dataclass(frozen=True, slots=True)
class SimulatedReplica:
    """Replica of a stack."""

    name: str
    profile: str  # true and configured hardware profile
    arguments: tuple[str, ...] = ()  # further ones of the program
    program: tuple[str, ...] = ("extproc", "simulate")  # of `python -m`
    kv_events_ports: tuple[int, int] | None = None  # of KV events, and of their replay


FLEET = (
    SimulatedReplica("fast-1", "llama-8b-h100"),
    SimulatedReplica("fast-2", "llama-8b-h100"),
    SimulatedReplica("slow-1", "llama-8b-a10"),
    SimulatedReplica("slow-2", "llama-8b-a10"),
)

# Ports that people know; the demo takes those that are free.
USUAL_PORTS: Mapping[str, int] = MappingProxyType(
    {"envoy": 8080, "envoy-admin": 9901, "router": 50051, "router-admin": 9090}
)


class Stack:
    """Runs the system within an ``async with`` block, and stops every process at its end.

    Processes are called ``redis``, ``poller``, ``poller-2``, …, ``router``, ``router-2``, …,
    ``envoy``, and by the names of the replicas. A process that starts again keeps its ports.
    """

    def __init__(
        self,
        directory: Path,
        replicas: Sequence[SimulatedReplica] = FLEET,
        settings: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
        usual_ports: Mapping[str, int] = MappingProxyType({}),
        routers: int = 1,
        pollers: int = 1,
    ) -> None:
        """Takes the ``directory`` of configurations and logs, ``settings`` for sections of the
        configuration, and ``usual_ports`` to use if they are free."""
        self.directory = directory
        self.replicas = replicas
        self.routers = _names("router", routers)
        self.pollers = _names("poller", pollers)
        admins = [f"{name}-admin" for name in (*self.routers, *self.pollers)]
        own = ["envoy", "envoy-admin", "redis", *self.routers, *admins]
        wanted = dict.fromkeys((*own, *(one.name for one in replicas)), 0)
        self.ports = pick_ports({**wanted, **usual_ports})
        self.config_file = directory / "extproc.yaml"
        self.access_log = directory / "access.log"
        self.ready_s = 0.0  # seconds from its start until requests could be routed
        self._settings = settings
        self._processes: dict[str, Process] = {}
        self._dismissed: set[str] = set()

    # -- addresses --------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self._url("envoy")

    @property
    def envoy_admin(self) -> str:
        return self._url("envoy-admin")

    @property
    def router_admin(self) -> str:
        return self.admin("router")

    @property
    def redis_url(self) -> str:
        return f"redis://{self.address('redis')}/0"

    @property
    def router_command(self) -> str:
        return shlex.join(self._service("router"))

    @property
    def explain_command(self) -> str:
        router = self.address("router-admin")
        return shlex.join(self._command("extproc", "explain", "--router", router))

    def admin(self, name: str) -> str:
        return self._url(f"{name}-admin")

    def address(self, name: str) -> str:
        """``ip:port`` of a replica or another name in ``ports``."""
        return f"127.0.0.1:{self.ports[name]}"

    @property
    def names(self) -> dict[str, str]:
        """``ip:port`` → name of the replica."""
        return {self.address(one.name): one.name for one in self.replicas}

    def name_of(self, address: str) -> str:
        """Name of a replica at ``ip:port``, or the address."""
        return self.names.get(address, address)

    def process(self, name: str) -> Process:
        return self._processes[name]

    def ended(self) -> list[Process]:
        """Processes that ended by themselves since the last call."""
        known = [one for name, one in self._processes.items() if name not in self._dismissed]
        gone = [one for one in known if not one.running]
        self._dismissed.update(one.name for one in gone)
        return gone

    def _url(self, name: str) -> str:
        return f"http://{self.address(name)}"

    # -- life -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start everything at once; return when any replica may get a request."""
        started = time.monotonic()
        self._write_configurations()
        replicas = [one.name for one in self.replicas]
        names = [*replicas, *self.routers, *self.pollers, "redis", "envoy"]
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in names:
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
        """Start a process (again), and return when it answers."""
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
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
            await self._processes["router"].wait_ready(partial(self._routes, session))

    async def _stop_all(self) -> None:
        self._dismissed.update(self._processes)
        if envoy := self._processes.get("envoy"):
            await envoy.stop()  # first: with its requests gone nobody else has to wait for them
        await asyncio.gather(*(process.stop() for process in self._processes.values()))

    # -- commands and configurations --------------------------------------------------------

    def _recipe(self, name: str) -> tuple[Sequence[str | Path], Check]:
        if name == "envoy":
            command = envoy_command(self.directory / "envoy.yaml", _ENVOY_WORKERS)
            flags = ("--file-flush-interval-msec", str(_FLUSH_MS))
            return [*command, *flags], answers(f"{self.envoy_admin}/ready")
        if name in (*self.routers, *self.pollers):
            return self._service(name), answers(f"{self.admin(name)}/healthz")
        replica = next(one for one in self.replicas if one.name == name)
        options = {"port": self.ports[name], "model": MODEL, "profile": replica.profile}
        ports = replica.kv_events_ports
        told = ("--kv-events-ports", *ports) if ports else ()
        argv = self._command(*replica.program, *_flags(options), *told, *replica.arguments)
        return argv, answers(f"{self._url(name)}/health")

    def _service(self, name: str) -> list[str]:
        command = "serve" if name in self.routers else "poll"
        own = {f"{command}.admin": self.address(f"{name}-admin")}
        if command == "serve":
            own["serve.listen"] = self.address(name)
        shared = self._command("extproc", command, "--config", self.config_file)
        return shared if name in ("router", "poller") else [*shared, *_flags(own)]

    def _command(self, *program: str | Path | int) -> list[str]:
        return [sys.executable, "-m", *map(str, program)]

    def _write_configurations(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(yaml.safe_dump(self._configuration(), sort_keys=False))
        bootstrap = self._bootstrap()
        add_access_log(bootstrap, self.access_log)
        (self.directory / "envoy.yaml").write_text(yaml.safe_dump(bootstrap, sort_keys=False))

    def _bootstrap(self) -> Bootstrap:
        return addressed(
            listen=self.address("envoy"),
            admin=self.address("envoy-admin"),
            routers=self._listening,
            replicas=[self.address(one.name) for one in self.replicas],
        )

    @property
    def _listening(self) -> list[str]:
        return [self.address(router) for router in self.routers]

    def _configuration(self) -> dict[str, Any]:
        sections: dict[str, dict[str, object]] = {
            "redis": {"url": self.redis_url},
            "serve": {"listen": self.address("router"), "admin": self.address("router-admin")},
            "route": {"policy_header": POLICY_HEADER},
            "poll": {"admin": self.address("poller-admin")},
        }
        for name, keys in self._settings.items():
            sections[name] = {**sections.get(name, {}), **keys}
        events = ("kv_events_port", "kv_events_replay_port")
        replicas = [
            {"url": self.address(one.name), "name": one.name, "profile": one.profile}
            | dict(zip(events, one.kv_events_ports or (), strict=False))
            for one in self.replicas
        ]
        return {"replicas": replicas, **sections}

    # -- readiness --------------------------------------------------------------------------

    async def _routes(self, session: aiohttp.ClientSession) -> bool:
        try:
            for router in self.routers:
                async with session.get(f"{self.admin(router)}/fleet") as response:
                    fleet = (await response.json())["replicas"]
                healthy = {replica["name"] for replica in fleet if replica["healthy"]}
                if healthy != {replica.name for replica in self.replicas}:
                    return False
            async with session.get(f"{self.envoy_admin}/clusters") as response:
                members = await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return False
        return all(f"::{one}::health_flags::healthy" in members for one in self._listening)


def _names(first: str, count: int) -> tuple[str, ...]:
    return (first, *(f"{first}-{number}" for number in range(2, count + 1)))


def _flags(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
