"""The demo's stack with long timeouts, and variants of it, for tests."""

import argparse
import asyncio
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from extproc.cli import main, simulate
from extproc.lab.harness import stack
from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.processes import Check, free_port, listening
from extproc.lab.harness.stack import SimulatedReplica
from extproc.lab.simulator import server
from extproc.lab.simulator.replica import Replica, ReplicaSettings
from tests import envoy_gateway, istio
from tests.patched import patched

ENVOY = Path(__file__).parents[2] / "envoy"
SETTINGS = {"serve": {"chunks_per_s": 1e6}}
"""Envoy sends every response to the router."""
FAST_AND_SLOW = (SimulatedReplica("one", "llama-8b-h100"), SimulatedReplica("two", "llama-8b-a10"))
"""The first is faster, so every request goes there while it works."""
TRANSLATED = {"envoy_gateway": envoy_gateway.bootstrap, "istio": istio.bootstrap}
"""Files that a control plane translates into Envoy's configuration."""
_HERE: tuple[str, ...] = ()
Change = Callable[[Bootstrap], object]


def equal_pair(*arguments: str) -> tuple[SimulatedReplica, ...]:
    """Return two replicas that are equally fast, with these arguments of the simulator."""
    return tuple(SimulatedReplica(name, "llama-8b-h100", arguments) for name in ("one", "two"))


def here(replicas: Iterable[SimulatedReplica], *apart: str) -> tuple[SimulatedReplica, ...]:
    """Let replicas run in the test's process, where they start faster. Replicas in ``apart`` stay
    processes, because they hang or die with requests in flight."""
    return tuple(
        replica if replica.name in apart else replace(replica, program=_HERE)
        for replica in replicas
    )


class PatientStack(stack.Stack):
    """A stack whose timeouts allow for a busy machine."""

    patience_s = 10
    doubts_s = 2.0  # resolution of the time for which a poller gets no answer from a replica
    router_constants: Mapping[str, object] = MappingProxyType({})  # patched in routers

    def __init__(
        self,
        *args: Any,
        change: Change = lambda _: None,
        headers: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        """``change``: changes the shipped configuration of Envoy. ``headers``: further headers that
        Envoy sends to the router with the body of a request, unless it sends all headers."""
        super().__init__(*args, **kwargs)
        self._change, self._headers = change, headers
        self._here: dict[str, AsyncExitStack] = {}

    async def start(self, name: str) -> None:
        for replica in self.replicas:
            if replica.name == name and replica.program == _HERE:
                self._here[name] = await _serve(replica, self.ports[name])
                return
        await super().start(name)

    async def kill(self, name: str) -> None:
        await (self._end_here(name) if name in self._here else super().kill(name))

    async def stop(self, name: str) -> None:
        await (self._end_here(name) if name in self._here else super().stop(name))

    async def _end_here(self, name: str) -> None:
        """End a replica in the test's process; requests in flight get half a second."""
        await self._here.pop(name).aclose()

    async def _stop_all(self) -> None:
        await super()._stop_all()
        await asyncio.gather(*map(self._end_here, [*self._here]))

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Stop a process within the block (SIGSTOP): it hangs, with its connections open."""
        self.process(name).signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process(name).signal(signal.SIGCONT)

    def _service(self, name: str) -> list[str]:
        _python, _option, _module, *arguments = super()._service(name)
        constants = dict(self.router_constants) if name in self.routers else {}
        if name in (self.pollers or self.routers):
            constants |= {"extproc.poll.replica.SILENCE_STEP_S": self.doubts_s}
        return patched(constants, *arguments) if constants else super()._service(name)

    def _shipped(self) -> Bootstrap:
        return super()._bootstrap()

    def _bootstrap(self) -> Bootstrap:
        bootstrap = self._shipped()
        self._change(bootstrap)
        if self._headers and (attributes := ext_proc_of(bootstrap).get("request_attributes")):
            attributes += [f"request.headers['{name}']" for name in self._headers]
        return bootstrap

    def _write_configurations(self) -> None:
        super()._write_configurations()
        file = self.directory / "envoy.yaml"
        text = patient(file.read_text(encoding="utf-8"), self.patience_s)
        file.write_text(text, encoding="utf-8")


class Behind(PatientStack):
    """A stack whose Envoy can be restarted with another configuration, while other parts go on."""

    name = "envoy"  # of the configuration: a file in envoy/, or a case of the test module
    cases: Mapping[str, Change] = MappingProxyType({})  # changes of envoy.yaml, by their names

    async def behind(self, name: str) -> None:
        if name == self.name:
            return
        before = self.config_file.read_text()
        await self.stop("envoy")
        self.name = name
        self._write_configurations()
        if self.config_file.read_text() != before:
            await self.stop("router")
        if not self.process("router").running:
            await self.start("router")
        await self.start("envoy")
        await self.wait_routing()

    def _shipped(self) -> Bootstrap:
        if (ENVOY / f"{self.name}.yaml").exists() and self.name != "envoy":
            return bootstrap_of(self, self.name)
        bootstrap = super()._shipped()
        if change := self.cases.get(self.name):
            change(bootstrap)
        return bootstrap


class FileStack(PatientStack):
    """A stack whose pollers get the replicas from ``replicas_file``."""

    @property
    def _replicas_file(self) -> Path:
        return self.directory / "replicas.yaml"

    def _configuration(self) -> dict[str, Any]:
        configuration = super()._configuration()
        self.list_replicas(configuration.pop("replicas"))
        return {"replicas_file": str(self._replicas_file), **configuration}

    def list_replicas(self, replicas: Sequence[Mapping[str, Any]]) -> None:
        self._replicas_file.write_text(yaml.safe_dump([*replicas]))

    def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = yaml.safe_load(self._replicas_file.read_text())
        return found


async def _serve(replica: SimulatedReplica, port: int) -> AsyncExitStack:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    words = ["--model", stack.MODEL, "--profile", replica.profile, *replica.arguments]
    if replica.kv_events_ports:
        words += ["--kv-events-ports", *map(str, replica.kv_events_ports)]
    given = parser.parse_args(words)
    settings = {field.name: getattr(given, field.name) for field in fields(ReplicaSettings)}
    running = AsyncExitStack()
    serving = server.serving(Replica(ReplicaSettings(**settings)), "127.0.0.1", port)
    await running.enter_async_context(serving)
    return running


def patient(envoy_file: str, seconds: int = PatientStack.patience_s) -> str:
    """Raise the timeouts of messages to the router, of health checks and of connections.

    Connections get 30 s: the kernel drops some of many at once, which are then tried again.
    """
    shorter = r"(\bmessage_timeout: )[\d.]+s|( timeout: )0\.5s"
    text = re.sub(shorter, rf"\1\g<2>{seconds}s", envoy_file)
    return re.sub(r"(\bconnect_timeout: )[\d.]+s", r"\g<1>30s", text)


def ext_proc_of(bootstrap: Bootstrap) -> dict[str, Any]:
    filters = {
        http_filter["name"]: http_filter["typed_config"]
        for http_filter in manager_of(bootstrap)["http_filters"]
    }
    settings: dict[str, Any] = filters["envoy.filters.http.ext_proc"]
    return settings


def cluster_of(bootstrap: Bootstrap, name: str) -> dict[str, Any]:
    clusters = bootstrap["static_resources"]["clusters"]
    return next(cluster for cluster in clusters if cluster["name"] == name)


def of_pool(pool: str) -> dict[str, Any]:
    """Return the ``typed_per_filter_config`` of a route to a pool."""
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    metadata = [{"key": "x-extproc-pool", "value": pool}]
    overrides = {"@type": kind, "overrides": {"grpc_initial_metadata": metadata}}
    return {"envoy.filters.http.ext_proc": overrides}


class EdsStack(FileStack):
    """A stack with the process ``eds``, whose Envoy runs envoy/eds.yaml."""

    name = "eds"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ports["eds"] = free_port()

    async def start(self, name: str) -> None:
        """Start the control plane before the first Envoy, which would otherwise retry later."""
        if name == "envoy" and self.name == "eds" and "eds" not in self._processes:
            await super().start("eds")
        await super().start(name)

    def _recipe(self, name: str) -> tuple[Sequence[str | Path], Check]:
        if name == "eds":
            argv = self._command("extproc", "eds", "--config", self.config_file)
            return argv, listening(self.ports["eds"])
        return super()._recipe(name)

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "eds": {"listen": self.address("eds")}}

    def _shipped(self) -> Bootstrap:
        return bootstrap_of(self, self.name)


def bootstrap_of(stack: PatientStack, name: str) -> Bootstrap:
    if translate := TRANSLATED.get(name):
        resources = (ENVOY / f"{name}.yaml").read_text(encoding="utf-8")
        return translate(
            list(yaml.safe_load_all(resources)),
            listen=stack.address("envoy"),
            admin=stack.address("envoy-admin"),
            replicas=[stack.address("one"), stack.address("two")],
            routers=[stack.address("router")],
        )
    ports = {
        8080: "envoy", 9901: "envoy-admin", 50051: "router", 18000: "eds", 8001: "one", 8002: "two",
    }  # fmt: skip
    text = (ENVOY / f"{name}.yaml").read_text(encoding="utf-8")
    for number, process in ports.items():
        if process in stack.ports:
            port = stack.ports[process]
            text = text.replace(f"port_value: {number}}}", f"port_value: {port}}}")
            text = text.replace(f"127.0.0.1:{number}", stack.address(process))
    bootstrap: Bootstrap = yaml.safe_load(text)
    return bootstrap


async def replicas(stack: PatientStack, *arguments: str) -> int:
    """Run ``extproc replicas``; return its exit status."""
    argv = ["replicas", *arguments, "--config", str(stack.config_file)]
    return await asyncio.to_thread(main, argv)
