"""Other routers, as their makers publish them: each a process that is an HTTP proxy itself.

``make peers`` installs them into ``.peers``, each into an environment of its own.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from prometheus_client.samples import Sample

from benchmarks.compare.contenders import Fleet, Front, Requests, Servers
from benchmarks.processes import get_json, get_samples
from extproc.lab.harness.processes import Process, pick_ports

INSTALLED = Path(__file__).parents[2] / ".peers"  # where `make peers` puts them

_READY_S = 60.0

# Endings of counters that say a policy was passed over: retries, circuit breakers, shed load.
_ALWAYS_ZERO = (
    *("retries_total", "retries_exhausted_total", "request_errors_total", "cb_state"),
    *("overload_shed_total", "overload_fallback_total", "liveness_fallback_total"),
)


@dataclass(frozen=True, slots=True)
class Product:
    name: str  # of its package and of its command
    best: str  # its policy that looks at how busy replicas are
    decisions: str  # its counter of decisions, by policy
    words: tuple[str, ...] = ()  # further words of its command line, before the options
    options: tuple[str, ...] = ()

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies that are known to work here; it has more."""
        return tuple(dict.fromkeys(("round_robin", self.best, "cache_aware")))

    @property
    def command(self) -> Path:
        return INSTALLED / self.name / "bin" / self.name

    @property
    def installed(self) -> bool:
        return self.command.is_file()

    @property
    def version(self) -> str:
        packages = INSTALLED.glob(f"{self.name}/lib/python*/site-packages")
        found = distributions(name=self.name, path=[str(one) for one in packages])
        return next((one.version for one in found), "")


PRODUCTS = {
    one.name: one
    for one in (
        Product(
            name="vllm-router",
            best="power_of_two",
            decisions="vllm_router_policy_decisions_total",
            options=("--worker-startup-timeout-secs", "20", "--worker-startup-check-interval", "1"),
        ),
        Product(
            name="smg",
            best="least_load",
            decisions="smg_worker_selection_total",
            words=("launch",),
            options=("--backend", "vllm", "--load-monitor-interval", "1"),
        ),
        Product(
            name="sglang-router",
            # Not power_of_two: it asks replicas for /get_load, which vLLM does not have, takes each
            # for equally busy then, and so picks at random.
            best="cache_aware",
            decisions="smg_worker_selection_total",
            words=("launch",),
        ),
    )
}


class Peer:
    parts: tuple[str, ...] = ()  # one process does it all

    def __init__(self, product: Product, policy: str) -> None:
        self.name = f"{product.name}:{policy}"
        self.about = f"{product.name} {product.version}, policy {policy}"
        self._product = product
        self._policy = policy

    @asynccontextmanager
    async def running(
        self, fleet: Fleet, servers: Servers, directory: Path, seed: int
    ) -> AsyncIterator[Front]:
        ports = pick_ports({"proxy": 0, "metrics": 0})
        url = f"http://127.0.0.1:{ports['proxy']}"
        name = self._product.name
        argv = [*self._command(ports), *(f"http://{address}" for address in servers.values())]

        async def knows_all() -> bool:
            return await _healthy(url) == len(servers)

        async def complaints(requests: Requests) -> list[str]:
            samples = await get_samples(f"http://127.0.0.1:{ports['metrics']}/metrics")
            found = self._complaints(samples, len(requests))
            if (healthy := await _healthy(url)) != len(servers):
                found.append(f"it uses {healthy} of {len(servers)} replicas")
            return found

        log = directory / f"{name}.log"
        async with await Process.start(name, argv, log=log, ready=knows_all, ready_s=_READY_S):
            yield Front(url, complaints)

    def _command(self, ports: Mapping[str, int]) -> list[str]:
        options = {
            "host": "127.0.0.1",
            "port": str(ports["proxy"]),
            "policy": self._policy,
            "prometheus-host": "127.0.0.1",
            "prometheus-port": str(ports["metrics"]),
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        product = self._product
        command = [str(product.command), *product.words, *words, *product.options]
        return [*command, "--worker-urls"]

    def _complaints(self, samples: Sequence[Sample], requests: int) -> list[str]:
        by_policy: Counter[str] = Counter()
        for one in samples:
            if one.name == self._product.decisions:
                by_policy[one.labels["policy"]] += int(one.value)
        found = trouble(samples)
        if set(by_policy) != {self._policy} or by_policy[self._policy] < requests:
            found.append(f"of {requests} requests its policies decided {dict(by_policy)}")
        return found


async def _healthy(url: str) -> int:
    page = await get_json(f"{url}/workers")
    return sum(bool(one["is_healthy"]) for one in page["workers"]) if page else 0


def trouble(samples: Iterable[Sample]) -> list[str]:
    """Retries, open circuit breakers, refusals and the like, out of its metrics."""
    found = []
    for one in samples:
        if one.name.endswith(_ALWAYS_ZERO) and one.value:
            labels = ", ".join(f'{name}="{value}"' for name, value in one.labels.items())
            found.append(f"its metrics say {one.name}{{{labels}}} {one.value:g}")
    return found
