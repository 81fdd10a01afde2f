"""Processes of a measurement, and the cores they run on."""

import json
import os
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.overhead.client import ClientReport
from benchmarks.processes import cpu_s, drop_ext_proc, get_text, memory_kb
from benchmarks.states import addresses
from extproc.lab.harness.envoy_config import TEMPLATE, addressed, manager_of
from extproc.lab.harness.processes import (
    Check,
    Process,
    answers,
    envoy_command,
    listening,
    pick_ports,
    start_redis,
)

_UPSTREAM = Path(__file__).with_name("upstream.yaml")
_PORTS = ("envoy", "envoy-admin", "router", "router-admin", "redis", "upstream")
_POOL = "overhead"
_INTERVAL_S = 0.2  # between two states of a replica, as pollers are configured by default
_READY_S = 60.0


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


class OverheadStack:
    def __init__(self, directory: Path, port: int, cores: Cores, router: Process | None) -> None:
        self._directory = directory
        self._port = port
        self._cores = cores
        self._router = router

    async def load(self, *arguments: str) -> ClientReport:
        log = self._directory / "client.log"
        log.unlink(missing_ok=True)
        argv = _python("benchmarks.overhead.client", str(self._port), *arguments)
        with _on(self._cores.others):
            client = await Process.start("client", argv, log=log)
        async with client:
            if await client.wait():
                raise RuntimeError(f"the client failed:\n{client.last_lines()}")
        return ClientReport(**json.loads(client.last_lines(1)))

    def cpu_s(self) -> float:
        return cpu_s(self._router.pid) if self._router else 0.0

    def memory_kb(self) -> float:
        return memory_kb(self._router.pid) if self._router else 0.0


@asynccontextmanager
async def running(
    setup: Setup, directory: Path, cores: Cores, hold_s: float
) -> AsyncIterator[OverheadStack]:
    """Runs the processes of a setup until the block ends; raises ProcessError if one fails.

    The upstream answers requests with the header ``x-hold`` after ``hold_s`` seconds.
    """
    ports = pick_ports(dict.fromkeys(_PORTS, 0))
    replicas = addresses(setup.replicas, ports["upstream"])
    upstream, front = directory / "upstream.yaml", directory / "envoy.yaml"
    upstream.write_text(_upstream(ports["upstream"], hold_s))
    front.write_text(_front(setup, ports, replicas))
    async with AsyncExitStack() as stack:

        async def start(name: str, argv: Sequence[str | Path], ready: Check | None) -> Process:
            log = directory / f"{name}.log"
            process = await Process.start(name, argv, log=log, ready=ready, ready_s=_READY_S)
            return await stack.enter_async_context(process)

        with _on(cores.others):
            await start("upstream", envoy_command(upstream, 1), listening(ports["upstream"]))
        router = None
        if setup.router == "proceed":
            with _on(cores.router):
                argv = _python("benchmarks.overhead.proceed", str(ports["router"]))
                router = await start("proceed", argv, listening(ports["router"]))
        elif setup.router == "extproc":
            with _on(cores.others):
                await stack.enter_async_context(await start_redis(directory, ports["redis"]))
                url = f"redis://127.0.0.1:{ports['redis']}/0"
                words = [url, _POOL, *map(str, (setup.replicas, ports["upstream"], _INTERVAL_S))]
                await start("states", _python("benchmarks.states", *words), None)
            config = directory / "extproc.yaml"
            config.write_text(_configuration(url, ports))
            with _on(cores.router):
                argv = _python("extproc", "serve", "--config", str(config))
                all_known = f'extproc_replicas{{health="healthy"}} {float(setup.replicas)}'
                ready = _page_has(ports["router-admin"], "metrics", all_known)
                router = await start("router", argv, ready)
        with _on(cores.others):
            ready = answers(f"http://127.0.0.1:{ports['envoy-admin']}/ready")
            await start("envoy", envoy_command(front, 1), ready)
        if router is not None:
            healthy = f"router::127.0.0.1:{ports['router']}::health_flags::healthy"
            await router.wait_ready(_page_has(ports["envoy-admin"], "clusters", healthy), _READY_S)
        yield OverheadStack(directory, ports["envoy"], cores, router)


@contextmanager
def _on(cores: Collection[int]) -> Iterator[None]:
    """Runs the processes that are started inside the block on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# -- configurations -------------------------------------------------------------------------


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _upstream(port: int, hold_s: float) -> str:
    bootstrap = yaml.safe_load(_UPSTREAM.read_text())
    (listener,) = bootstrap["static_resources"]["listeners"]
    listener["address"]["socket_address"]["port_value"] = port
    fault, _ = manager_of(bootstrap)["http_filters"]
    fault["typed_config"]["delay"]["fixed_delay"] = f"{hold_s:.3f}s"
    return yaml.safe_dump(bootstrap)


def _front(setup: Setup, ports: dict[str, int], replicas: Sequence[str]) -> str:
    """Envoy configuration of the setup, without ext_proc filter if Envoy is alone."""
    bootstrap = addressed(
        listen=f"127.0.0.1:{ports['envoy']}",
        admin=f"127.0.0.1:{ports['envoy-admin']}",
        routers=[f"127.0.0.1:{ports['router']}"],
        replicas=replicas,
        template=setup.envoy,
    )
    if setup.router == "none":
        drop_ext_proc(bootstrap)
    return yaml.safe_dump(bootstrap)


def _configuration(redis_url: str, ports: dict[str, int]) -> str:
    keys = {"listen": "router", "admin": "router-admin"}
    serve = {key: f"127.0.0.1:{ports[name]}" for key, name in keys.items()}
    return yaml.safe_dump({"pool": _POOL, "redis": {"url": redis_url}, "serve": serve})


def _page_has(port: int, page: str, line: str) -> Check:
    async def check() -> bool:
        return line in await get_text(f"http://127.0.0.1:{port}/{page}")

    return check
