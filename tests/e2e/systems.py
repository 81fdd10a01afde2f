"""Systems that several files of tests share: pools behind one Envoy, and routers of one pool."""

from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

from extproc.lab.harness.envoy_config import Bootstrap, endpoints, manager_of
from extproc.lab.harness.stack import SimulatedReplica
from tests.e2e.stack import Stack, ext_proc_of

A10, H100 = "llama-8b-a10", "llama-8b-h100"
OTHER = "qwen-7b"
LOAD_S = 0.5  # seconds that an adapter takes to load
_TELLS = "--enable-prompt-tokens-details"
_UNCACHED = "--no-enable-prefix-caching"
_LORA = ("--lora-modules", "law", "code", "tax", "--max-loras", "1")
_LOADING = (*_LORA, "--lora-load-seconds", str(LOAD_S))
POOLS = {
    "default": (
        SimulatedReplica("llama", A10),
        SimulatedReplica("qwen", A10, ("--model", OTHER)),
    ),
    "second": (SimulatedReplica("second-1", A10), SimulatedReplica("second-2", A10)),
    "contexts": (
        SimulatedReplica("short", H100, ("--max-model-len", "4096")),
        SimulatedReplica("long", A10),
    ),
    "adapters": (
        SimulatedReplica("lora-1", H100, _LOADING),
        SimulatedReplica("lora-2", H100, _LOADING),
    ),
    "prefixes": (
        SimulatedReplica("cached-1", H100, (_TELLS,)),
        SimulatedReplica("cached-2", H100, (_TELLS,)),
        SimulatedReplica("cached-3", H100, (_TELLS,)),
        SimulatedReplica("off", H100, (_TELLS, _UNCACHED, "--model", "x")),
        SimulatedReplica("silent", H100, ("--model", "y")),
    ),
    "alone": (SimulatedReplica("alone", A10),),
}
LOST = "lost"
"""A route names this pool, which is not configured; its cluster is the one of ``second``."""


class Pools(Stack):
    """The pools above behind one Envoy: a pool's host is its name with ``.example``; the default
    pool serves other hosts, and ``second`` the paths below ``/batch/``."""

    def __init__(self, directory: Path) -> None:
        fleet = tuple(chain.from_iterable(POOLS.values()))
        super().__init__(directory, fleet, {"serve": {"chunks_per_s": 1e6}})

    def _configuration(self) -> dict[str, Any]:
        whole = super()._configuration()
        by_name = {one["name"]: one for one in whole["replicas"]}
        pools = {
            name: {"replicas": [by_name[one.name] for one in replicas]}
            for name, replicas in POOLS.items()
        }
        return {**whole, **pools.pop("default"), "pools": pools}

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        clusters = bootstrap["static_resources"]["clusters"]
        default = next(one for one in clusters if one["name"] == "replicas")
        hosts = manager_of(bootstrap)["route_config"]["virtual_hosts"]
        for name, replicas in POOLS.items():
            members = endpoints([self.address(one.name) for one in replicas])
            if name == "default":
                default["load_assignment"]["endpoints"] = members
                continue
            clusters.append(deepcopy(default) | {"name": name})
            clusters[-1]["load_assignment"] |= {"endpoints": members}
            hosts.append(_host(hosts[0], name, name))
        hosts.append(_host(hosts[0], LOST, "second"))
        hosts[0]["routes"].insert(0, _by_prefix(hosts[1]))
        return bootstrap


def _host(pattern: dict[str, Any], pool: str, cluster: str) -> dict[str, Any]:
    host = deepcopy(pattern) | {"name": pool, "domains": [f"{pool}.example"]}
    for route in host["routes"]:
        route["route"]["cluster"] = cluster
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    metadata = [{"key": "x-extproc-pool", "value": pool}]
    overrides = {"@type": kind, "overrides": {"grpc_initial_metadata": metadata}}
    host["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": overrides}
    return host


def _by_prefix(host: dict[str, Any]) -> dict[str, Any]:
    """As docs/configuration.md has it: the filter sees the path before it is rewritten."""
    route = host["routes"][-1]["route"] | {"prefix_rewrite": "/"}
    metadata = host["typed_per_filter_config"]
    return {"match": {"prefix": "/batch/"}, "route": route, "typed_per_filter_config": metadata}


_AFFINITY: dict[str, dict[str, object]] = {
    "route": {
        "policy": "round_robin",
        "session_header": "x-session-id",
        "session_cookie": "sid",
        "session_cost_s": 0.5,
    },
    "serve": {"chunks_per_s": 0.0, "drain_s": 1.0},
}


class Routers(Stack):
    """Two routers and four equal replicas in turn; Envoy tells the routers the headers that name
    sessions."""

    FLEET = tuple(SimulatedReplica(f"r{number}", H100) for number in range(4))

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, self.FLEET, _AFFINITY, routers=2)

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        told = ["request.headers['x-session-id']", "request.headers['cookie']"]
        ext_proc_of(bootstrap)["request_attributes"] += told
        return bootstrap
