"""Other endpoint pickers: programs that choose the replica of a request for Envoy, by ext_proc."""

import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import yaml
from prometheus_client.samples import Sample

from benchmarks.compare.contenders import ComparedFleet, Front, Requests, Servers
from benchmarks.compare.envoy import envoy_stats, start_envoy
from extproc.lab.harness.envoy_config import Bootstrap, endpoints, socket_address
from extproc.lab.harness.pages import get_text, samples_of
from extproc.lab.harness.processes import Process, listening, pick_ports


@dataclass(frozen=True, slots=True)
class PickerAccount:
    """Decisions of a picker according to its own metrics and log."""

    policy: set[str]  # strategies or plugins that should decide
    used: set[str]  # strategies or plugins that decided
    decided: Counter[str]  # decisions by `ip:port`
    replicas: int | None  # ready replicas; None if the picker does not count them
    failed: int  # failed decisions or requests

    def uses_all(self, servers: Servers) -> bool:
        return self.replicas in (None, len(servers))

    def complaints(self, requests: Requests, servers: Servers) -> list[str]:
        """Reasons why the policy did not decide all of these requests."""
        found = []
        if self.used != self.policy:
            found.append(f"the picker decided by {sorted(self.used)}, not by {sorted(self.policy)}")
        if not self.uses_all(servers):
            found.append(f"the picker uses {self.replicas} of {len(servers)} replicas")
        if self.failed:
            found.append(f"the picker counts {self.failed} failures")
        served = Counter(request["replica"] for request in requests if request["replica"])
        elsewhere = (served - self.decided).total()
        if elsewhere:
            found.append(f"{elsewhere} requests went to other replicas than the picker chose")
        return found


class PickerProduct(ABC):
    """Endpoint picker of another project, run as its makers publish the program."""

    name: ClassVar[str]
    program: ClassVar[str]
    policies: ClassVar[tuple[str, ...]]  # the usual policy first
    clusters: ClassVar[Mapping[str, str]]  # cluster of the Envoy file → port, `grpc` or `http`

    @property
    def envoy(self) -> Path:
        return Path(__file__).with_name(f"{self.name}.yaml")

    @abstractmethod
    def command(
        self, policy: str, model: str, servers: Servers, ports: Mapping[str, int], directory: Path
    ) -> tuple[list[str], dict[str, str]]:
        """Command line and environment of the program; writes its settings to ``directory``."""

    @abstractmethod
    def account(
        self, policy: str, samples: Iterable[Sample], log: str, servers: Servers
    ) -> PickerAccount:
        """Reads the account from the picker's metrics or, if they lack something, from its log."""


class PickerContender:
    parts: tuple[str, ...] = ("picker",)

    def __init__(self, product: PickerProduct, policy: str, program: Path) -> None:
        self.name = f"{product.name}:{policy}"
        self.about = f"{product.name}, policy {policy}, behind its makers' Envoy file"
        self._product = product
        self._policy = policy
        self._program = program

    @asynccontextmanager
    async def running(
        self, fleet: ComparedFleet, servers: Servers, directory: Path, seed: int
    ) -> AsyncIterator[Front]:
        ports = pick_ports(dict.fromkeys(("envoy", "admin", "grpc", "health", "http"), 0))
        admin, log = f"http://127.0.0.1:{ports['admin']}", directory / "picker.log"
        arguments, env = self._product.command(self._policy, fleet.model, servers, ports, directory)

        async def account() -> PickerAccount:
            page = await get_text(f"http://127.0.0.1:{ports['http']}/metrics") or ""
            text = log.read_text(errors="replace")
            return self._product.account(self._policy, samples_of(page), text, servers)

        async def ready() -> bool:
            if not await listening(ports["grpc"])():
                return False
            return (await account()).uses_all(servers)

        async def complaints(requests: Requests) -> list[str]:
            found = (await account()).complaints(requests, servers)
            stats = await envoy_stats(admin)
            allowed = sum(n for name, n in stats.items() if name.endswith("failure_mode_allowed"))
            if allowed:
                found.append(f"{allowed} requests went on without the picker's answer")
            return found

        name, command = self._product.program, [str(self._program), *arguments]
        picker = Process.start(name, command, log=log, ready=ready, env=env)
        async with (
            await picker as started,
            await start_envoy(self.bootstrap(ports, servers), admin, directory),
        ):
            url = f"http://127.0.0.1:{ports['envoy']}"
            yield Front(url, complaints, parts={"picker": started})

    def bootstrap(self, ports: Mapping[str, int], servers: Servers) -> Bootstrap:
        bootstrap: Bootstrap = yaml.safe_load(self._product.envoy.read_text())
        resources = bootstrap["static_resources"]
        bootstrap["admin"]["address"] = socket_address(f"127.0.0.1:{ports['admin']}")
        resources["listeners"][0]["address"] = socket_address(f"127.0.0.1:{ports['envoy']}")
        for cluster in resources["clusters"]:
            if port := self._product.clusters.get(cluster["name"]):
                cluster["load_assignment"]["endpoints"] = endpoints([f"127.0.0.1:{ports[port]}"])
        return bootstrap


def find_program(product: PickerProduct, programs: Path | None) -> Path | None:
    """Path of a picker's program, in ``programs`` or on PATH; None if missing."""
    at = programs and shutil.which(product.program, path=str(programs))
    path = at or shutil.which(product.program)
    return Path(path) if path else None
