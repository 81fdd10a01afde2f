"""Envoy alone, with a load balancing policy of its own."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.attached import drop_ext_proc
from benchmarks.compare.contenders import Front, Requests
from benchmarks.compare.fleets import Fleet, Servers
from benchmarks.pages import get_text
from extproc.lab.harness.envoy_config import Bootstrap, add_access_log, addressed, manager_of
from extproc.lab.harness.ports import pick_ports
from extproc.lab.harness.processes import Process, answers, envoy_command

_TYPES = {
    "round_robin": "round_robin.v3.RoundRobin",
    "least_request": "least_request.v3.LeastRequest",
    "least_request_weighted": "least_request.v3.LeastRequest",
    "random": "random.v3.Random",
}
POLICIES = tuple(_TYPES)

_FASTEST = 100  # weight of the fastest replica
_WORKERS = 2  # as many as the demo's stack gives the Envoy beside a router
_READY_S = 30.0


class EnvoyAlone:
    """The project's Envoy file without its router."""

    parts: tuple[str, ...] = ()

    def __init__(self, policy: str) -> None:
        self.name = f"envoy:{policy}"
        name, weighted, _ = policy.partition("_weighted")
        told = ", replicas weighted by their true speeds" if weighted else ""
        self.about = f"Envoy's own {name.upper()}, no router{told}"
        self._policy = policy
        self._weighted = bool(weighted)

    @asynccontextmanager
    async def running(
        self, fleet: Fleet, servers: Servers, directory: Path, seed: int
    ) -> AsyncIterator[Front]:
        ports = pick_ports({"envoy": 0, "admin": 0})
        admin = f"http://127.0.0.1:{ports['admin']}"

        async def complaints(requests: Requests) -> list[str]:
            found = await replica_trouble(admin, len(servers))
            lines = (await get_text(f"{admin}/clusters")).splitlines()
            sent = [int(line.split("::")[-1]) for line in lines if "::rq_total::" in line]
            uneven = max(sent, default=0) - min(sent, default=0) > _WORKERS  # each has its round
            if self._policy == "round_robin" and uneven:
                found.append(f"round robin sent the replicas {sent} requests: not in turn")
            return found

        async with await start_envoy(self._bootstrap(ports, fleet, servers), admin, directory):
            yield Front(f"http://127.0.0.1:{ports['envoy']}", complaints)

    def _bootstrap(self, ports: Mapping[str, int], fleet: Fleet, servers: Servers) -> Bootstrap:
        bootstrap = addressed(
            listen=f"127.0.0.1:{ports['envoy']}",
            admin=f"127.0.0.1:{ports['admin']}",
            routers=[],
            replicas=servers.values(),
        )
        resources = bootstrap["static_resources"]
        (replicas,) = (one for one in resources["clusters"] if one["name"] == "replicas")
        replicas["load_balancing_policy"] = _balancing(self._policy)
        (group,) = replicas["load_assignment"]["endpoints"]
        if self._weighted:
            for member, weight in zip(group["lb_endpoints"], weights(fleet, servers), strict=True):
                member["load_balancing_weight"] = weight
        resources["clusters"] = [replicas]
        drop_ext_proc(bootstrap)
        return bootstrap


async def start_envoy(bootstrap: Bootstrap, admin: str, directory: Path) -> Process:
    """An Envoy that says who served a request, once its admin address answers.

    Raises:
        ProcessError: it does not start.
    """
    config, log = directory / "envoy.yaml", directory / "envoy.log"
    says_who(bootstrap)
    add_access_log(bootstrap, directory / "access.log")
    config.write_text(yaml.safe_dump(bootstrap, sort_keys=False))
    argv, ready = envoy_command(config, _WORKERS), answers(f"{admin}/ready")
    return await Process.start("envoy", argv, log=log, ready=ready, ready_s=_READY_S)


def says_who(bootstrap: Bootstrap) -> None:
    """From now on Envoy puts who served a request into each response.

    A real vLLM does not say; a simulated replica says the same.
    """
    manager_of(bootstrap)["route_config"]["response_headers_to_add"] = [
        {
            "header": {"key": "x-served-by", "value": "%UPSTREAM_REMOTE_ADDRESS%"},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
    ]


def weights(fleet: Fleet, servers: Servers) -> list[int]:
    """In the order of the servers, in proportion to their speeds."""
    fastest = max(fleet.speeds.values())
    return [max(round(_FASTEST * fleet.speeds[name] / fastest), 1) for name in servers]


def _balancing(policy: str) -> dict[str, Any]:
    kind = f"type.googleapis.com/envoy.extensions.load_balancing_policies.{_TYPES[policy]}"
    name = f"envoy.load_balancing_policies.{_TYPES[policy].partition('.')[0]}"
    return {
        "policies": [{"typed_extension_config": {"name": name, "typed_config": {"@type": kind}}}]
    }


async def replica_trouble(admin: str, replicas: int) -> list[str]:
    """What an Envoy met on its way to the replicas that its policy did not ask for."""
    stats = await envoy_stats(admin)
    if not stats:
        return [f"Envoy does not say what it did: {admin}/stats does not answer"]
    found = []
    healthy = stats.get("cluster.replicas.membership_healthy", 0)
    if healthy != replicas:
        found.append(f"Envoy uses {healthy} of {replicas} replicas")
    for name in ("upstream_rq_retry", "upstream_rq_pending_overflow", "upstream_cx_connect_fail"):
        if count := stats.get(f"cluster.replicas.{name}", 0):
            found.append(f"Envoy counts {count} of {name}")
    return found


async def envoy_stats(admin: str) -> dict[str, int]:
    lines = (await get_text(f"{admin}/stats")).splitlines()
    pairs = (line.rpartition(": ") for line in lines)
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}
