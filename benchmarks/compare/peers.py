"""Other routers as their makers publish them. Each is an HTTP proxy in its own process.

``make peers`` installs each into its own environment below ``.peers``.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from prometheus_client.samples import Sample

from benchmarks.compare.contenders import ComparedFleet, Front, Requests, Servers
from extproc.lab.harness.pages import get_json, get_text, samples_of
from extproc.lab.harness.processes import Process, flags, pick_ports

INSTALLED = Path(__file__).parents[2] / ".peers"  # of `make peers`

# Endings of metrics that are 0 unless requests bypass the policy: retries, shed load, …
_ALWAYS_ZERO = (
    *("retries_total", "retries_exhausted_total", "request_errors_total", "cb_state"),
    *("overload_shed_total", "overload_fallback_total", "liveness_fallback_total"),
)


@dataclass(frozen=True, slots=True)
class ProxyProduct:
    name: str  # of the package and of the command
    best: str  # policy that considers the load of the replicas
    decisions: str  # metric that counts decisions by policy
    words: tuple[str, ...] = ()  # words of the command line before the options
    options: tuple[str, ...] = ()

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies that are known to work in this comparison; the product has more."""
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
        found = distributions(name=self.name, path=[str(folder) for folder in packages])
        return next((package.version for package in found), "")


PROXIES = {
    product.name: product
    for product in (
        ProxyProduct(
            name="vllm-router",
            best="power_of_two",
            decisions="vllm_router_policy_decisions_total",
            options=("--worker-startup-timeout-secs", "20", "--worker-startup-check-interval", "1"),
        ),
        ProxyProduct(
            name="smg",
            best="least_load",
            decisions="smg_worker_selection_total",
            words=("launch",),
            options=("--backend", "vllm", "--load-monitor-interval", "1"),
        ),
        ProxyProduct(
            name="sglang-router",
            # Not power_of_two: it asks for /get_load, which vLLM does not have, then takes all
            # replicas for equally busy, and so picks at random.
            best="cache_aware",
            decisions="smg_worker_selection_total",
            words=("launch",),
        ),
    )
}


class ProxyContender:
    parts: tuple[str, ...] = ()  # a single process: none can fail alone

    def __init__(self, product: ProxyProduct, policy: str) -> None:
        self.name = f"{product.name}:{policy}"
        self.about = f"{product.name} {product.version}, policy {policy}"
        self._product = product
        self._policy = policy

    @asynccontextmanager
    async def running(
        self, fleet: ComparedFleet, servers: Servers, directory: Path, seed: int
    ) -> AsyncIterator[Front]:
        ports = pick_ports({"proxy": 0, "metrics": 0})
        url = f"http://127.0.0.1:{ports['proxy']}"
        name = self._product.name
        argv = [*self._command(ports), *(f"http://{address}" for address in servers.values())]

        async def all_healthy() -> bool:
            return await _healthy(url) == len(servers)

        async def complaints(requests: Requests) -> list[str]:
            page = await get_text(f"http://127.0.0.1:{ports['metrics']}/metrics") or ""
            found = self._complaints(samples_of(page), len(requests))
            if (healthy := await _healthy(url)) != len(servers):
                found.append(f"{name} uses {healthy} of {len(servers)} replicas")
            return found

        log = directory / f"{name}.log"
        async with await Process.start(name, argv, log=log, ready=all_healthy):
            yield Front(url, complaints)

    def _command(self, ports: Mapping[str, int]) -> list[str]:
        options = {
            "host": "127.0.0.1",
            "port": ports["proxy"],
            "policy": self._policy,
            "prometheus-host": "127.0.0.1",
            "prometheus-port": ports["metrics"],
        }
        product = self._product
        command = [str(product.command), *product.words, *flags(options), *product.options]
        return [*command, "--worker-urls"]

    def _complaints(self, samples: Sequence[Sample], requests: int) -> list[str]:
        by_policy: Counter[str] = Counter()
        for sample in samples:
            if sample.name == self._product.decisions:
                by_policy[sample.labels["policy"]] += int(sample.value)
        found = metric_complaints(samples)
        if set(by_policy) != {self._policy} or by_policy[self._policy] < requests:
            found.append(f"of {requests} requests, its policies decided {dict(by_policy)}")
        return found


async def _healthy(url: str) -> int:
    page = await get_json(f"{url}/workers")
    return sum(bool(worker["is_healthy"]) for worker in page["workers"]) if page else 0


def metric_complaints(samples: Iterable[Sample]) -> list[str]:
    """Problems in a proxy's metrics that make a run wrong: retries, refusals and the like."""
    found = []
    for sample in samples:
        if sample.name.endswith(_ALWAYS_ZERO) and sample.value:
            labels = ", ".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found.append(f"its metrics count {sample.name}{{{labels}}} {sample.value:g}")
    return found
