"""Stack of a measurement: one server replaces all replicas, and the router has its own core."""

import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.overhead.client import ClientReport
from benchmarks.states import PROFILE, addresses
from extproc.lab.harness.envoy_config import TEMPLATE, Bootstrap, drop_ext_proc, manager_of
from extproc.lab.harness.processes import Check, Process, envoy_command, free_port, listening
from extproc.lab.harness.stack import SimulatedReplica, Stack

_UPSTREAM = Path(__file__).with_name("upstream.yaml")
_POOL = "overhead"
_INTERVAL_S = 0.2  # between two states of a replica, as pollers are configured by default
_STARTED = {
    "none": ["upstream", "envoy"],
    "proceed": ["upstream", "router", "envoy"],
    "extproc": ["upstream", "states", "router", "envoy"],  # `states` starts Redis, too
}


@dataclass(frozen=True, slots=True)
class Setup:
    router: str  # `none`: Envoy alone; `proceed`: an ext_proc server that does nothing; `extproc`
    replicas: int
    envoy: Path = TEMPLATE  # configuration file of Envoy

    @property
    def name(self) -> str:
        sized = f"+ router, {self.replicas} replica{'s' * (self.replicas != 1)}"
        names = {"none": "Envoy alone", "proceed": "+ do-nothing ext_proc", "extproc": sized}
        router = names[self.router]
        return router if self.envoy == TEMPLATE else f"{router}, {self.envoy.stem}"


@dataclass(frozen=True, slots=True)
class Cores:
    router: frozenset[int]  # for the router alone
    others: frozenset[int]

    @classmethod
    def of_this_machine(cls) -> "Cores":
        """Gives the router the last core. On a machine with a single core, all processes share
        it."""
        usable = sorted(os.sched_getaffinity(0))
        return cls(frozenset(usable[-1:]), frozenset(usable[:-1] or usable))

    def __str__(self) -> str:
        router, others = (", ".join(map(str, sorted(of))) for of in (self.router, self.others))
        return f"router on core {router}; Envoy, upstream, client and Redis on {others}"


@contextmanager
def running_on(cores: Collection[int]) -> Iterator[None]:
    """Runs this process, and processes that it starts inside the block, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class OverheadStack(Stack):
    """Stack of a setup. The server ``upstream`` answers a request that has the header ``x-hold``
    only after ``hold_s`` seconds; ``states`` takes the place of the poller."""

    envoy_workers = 1
    logs_accesses = False

    def __init__(
        self, setup: Setup, directory: Path, router_cores: Collection[int], hold_s: float
    ) -> None:
        self._setup = setup
        self._router_cores = ",".join(map(str, router_cores))
        self._hold_s = hold_s
        self._upstream = free_port()
        self._upstream_file = directory / "upstream.yaml"
        self.template = setup.envoy
        replicas = [
            SimulatedReplica(address, PROFILE, address=address)
            for address in addresses(setup.replicas, self._upstream)
        ]
        super().__init__(directory, replicas)

    @property
    def process_names(self) -> list[str]:
        return _STARTED[self._setup.router]

    async def load(self, *arguments: str) -> ClientReport:
        log = self.directory / "client.log"
        log.unlink(missing_ok=True)
        port = self.ports["envoy"]
        argv = self._command("benchmarks.overhead.client", str(port), *arguments)
        async with await Process.start("client", argv, log=log) as client:
            if await client.wait():
                raise RuntimeError(f"the client failed:\n{client.last_lines()}")
        return ClientReport(**json.loads(client.last_lines(1)))

    def cpu_s(self) -> float:
        return 0.0 if self._setup.router == "none" else self.process("router").cpu_s()

    def memory_kb(self) -> float:
        return 0.0 if self._setup.router == "none" else self.process("router").memory_kb()

    async def start(self, name: str) -> None:
        """Starts a process. Redis is started before ``states``, which would end without it."""
        if name == "states":
            await super().start("redis")
        await super().start(name)

    async def wait_routing(self) -> None:
        if self._setup.router != "none":
            await super().wait_routing()

    async def _routers_know_replicas(self) -> bool:
        return self._setup.router == "proceed" or await super()._routers_know_replicas()

    def _recipe(self, name: str) -> tuple[Sequence[str | Path], Check]:
        if name == "upstream":
            return envoy_command(self._upstream_file, 1), listening(self._upstream)
        if name == "states":
            words = self.redis_url, _POOL, self._setup.replicas, self._upstream, _INTERVAL_S
            argv = self._command("benchmarks.states", *map(str, words))
            return argv, listening(self.ports["redis"])
        if name != "router":
            return super()._recipe(name)
        pinned = ["taskset", "--cpu-list", self._router_cores]
        if self._setup.router == "proceed":
            port = self.ports["router"]
            argv = self._command("benchmarks.overhead.proceed", str(port))
            return [*pinned, *argv], listening(port)
        command, ready = super()._recipe(name)
        return [*pinned, *command], ready

    def _write_configurations(self) -> None:
        super()._write_configurations()
        upstream = yaml.safe_load(_UPSTREAM.read_text())
        (listener,) = upstream["static_resources"]["listeners"]
        listener["address"]["socket_address"]["port_value"] = self._upstream
        fault, _ = manager_of(upstream)["http_filters"]
        fault["typed_config"]["delay"]["fixed_delay"] = f"{self._hold_s:.3f}s"
        self._upstream_file.write_text(yaml.safe_dump(upstream))

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        if self._setup.router == "none":
            drop_ext_proc(bootstrap)
        return bootstrap

    def _configuration(self) -> dict[str, Any]:
        whole = super()._configuration()
        return {"pool": _POOL, "redis": whole["redis"], "serve": whole["serve"]}
