"""Envoy alone, with a load balancing policy of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.compare.contenders import Prediction, Requests, get_text
from benchmarks.compare.fleets import Fleet, Servers
from extproc.demo.envoy_config import render
from extproc.demo.ports import pick_ports
from extproc.demo.processes import Process, answers, envoy_binary

_TYPES = {
    "round_robin": "round_robin.v3.RoundRobin",
    "least_request": "least_request.v3.LeastRequest",
    "random": "random.v3.Random",
}
POLICIES = tuple(_TYPES)

_WORKERS = 2
"""As many as the demo's stack gives the Envoy beside a router."""
_READY_S = 30.0


class EnvoyAlone:
    """The project's Envoy file without its router."""

    def __init__(self, policy: str) -> None:
        self.name = f"envoy:{policy}"
        self.about = f"Envoy's own {policy.upper()}, no router"
        self._policy = policy

    @asynccontextmanager
    async def running(
        self, fleet: Fleet, servers: Servers, directory: Path, seed: int
    ) -> AsyncIterator["_Front"]:
        """Runs it; the seed is of no use to it."""
        ports = pick_ports({"envoy": 0, "admin": 0})
        config = directory / "envoy.yaml"
        config.write_text(yaml.safe_dump(self._bootstrap(ports, servers), sort_keys=False))
        options = ["--concurrency", str(_WORKERS), "--log-level", "warning"]
        argv: list[str | Path] = [envoy_binary(), "--config-path", config, *options]
        argv += ["--disable-hot-restart"]
        admin = f"http://127.0.0.1:{ports['admin']}"
        log, ready = directory / "envoy.log", answers(f"{admin}/ready")
        async with await Process.start("envoy", argv, log=log, ready=ready, ready_s=_READY_S):
            even = self._policy == "round_robin"
            yield _Front(f"http://127.0.0.1:{ports['envoy']}", admin, len(servers), even)

    def _bootstrap(self, ports: dict[str, int], servers: Servers) -> Any:
        bootstrap = yaml.safe_load(
            render(
                listen_port=ports["envoy"],
                admin_port=ports["admin"],
                router_ports=[],
                replica_addresses=list(servers.values()),
            )
        )
        resources = bootstrap["static_resources"]
        clusters = {one["name"]: one for one in resources["clusters"]}
        clusters["replicas"]["load_balancing_policy"] = _balancing(self._policy)
        resources["clusters"] = [clusters["replicas"]]
        manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        filters = manager["http_filters"]
        filters[:] = [one for one in filters if one["name"] != "envoy.filters.http.ext_proc"]
        # A real vLLM does not say who served; a simulated replica says the same.
        manager["route_config"]["response_headers_to_add"] = [
            {
                "header": {"key": "x-served-by", "value": "%UPSTREAM_REMOTE_ADDRESS%"},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ]
        return bootstrap


def _balancing(policy: str) -> dict[str, Any]:
    kind = f"type.googleapis.com/envoy.extensions.load_balancing_policies.{_TYPES[policy]}"
    name = f"envoy.load_balancing_policies.{policy}"
    return {
        "policies": [{"typed_extension_config": {"name": name, "typed_config": {"@type": kind}}}]
    }


@dataclass(frozen=True, slots=True)
class _Front:
    url: str
    admin: str
    replicas: int
    even: bool
    """Whether every replica must have got as many requests."""

    async def complaints(self, requests: Requests) -> list[str]:
        found = await replica_trouble(self.admin, self.replicas)
        sent = await _sent(self.admin)
        if self.even and max(sent) - min(sent) > _WORKERS:  # each has a round of its own
            found.append(f"round robin sent the replicas {sent} requests: not in turn")
        return found

    async def predictions(self) -> dict[str, Prediction]:
        return {}


async def replica_trouble(admin: str, replicas: int) -> list[str]:
    """What an Envoy met on its way to the replicas that its policy did not ask for."""
    stats = await envoy_stats(admin)
    found = []
    healthy = stats.get("cluster.replicas.membership_healthy", 0)
    if healthy != replicas:
        found.append(f"Envoy uses {healthy} of {replicas} replicas")
    for name in ("upstream_rq_retry", "upstream_rq_pending_overflow", "upstream_cx_connect_fail"):
        if count := stats.get(f"cluster.replicas.{name}", 0):
            found.append(f"Envoy counts {count} of {name}")
    return found


async def envoy_stats(admin: str) -> dict[str, int]:
    """Counters and gauges by name."""
    lines = (await get_text(f"{admin}/stats")).splitlines()
    pairs = (line.rpartition(": ") for line in lines)
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}


async def _sent(admin: str) -> list[int]:
    """Requests that Envoy sent to each replica."""
    lines = (await get_text(f"{admin}/clusters")).splitlines()
    return [int(line.split("::")[-1]) for line in lines if "::rq_total::" in line]
