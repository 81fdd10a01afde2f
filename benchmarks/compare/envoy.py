"""Envoy alone with its own load balancing policies, and Envoy with this project's router."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.compare.contenders import ComparedFleet, Front, Requests, Servers
from benchmarks.discrete import poll_interval
from extproc.lab.harness.envoy_config import (
    Bootstrap,
    add_access_log,
    addressed,
    drop_ext_proc,
    manager_of,
)
from extproc.lab.harness.pages import decisions, get_text
from extproc.lab.harness.processes import Process, answers, envoy_command, pick_ports
from extproc.lab.harness.stack import SimulatedReplica, Stack

_TYPES = {
    "round_robin": "round_robin.v3.RoundRobin",
    "least_request": "least_request.v3.LeastRequest",
    "least_request_weighted": "least_request.v3.LeastRequest",
    "random": "random.v3.Random",
}
POLICIES = tuple(_TYPES)
OBSERVED = "round_robin", "least_request", "random"  # policies that need no weights

_OBSERVE = Path(__file__).parents[2] / "envoy" / "observe.yaml"
_FASTEST = 100  # weight of the fastest replica
_WORKERS = 2  # as in the demo's stack, whose Envoy runs beside a router
_DECISIONS_KEPT = 25_000
_PARTS = {"picker": "router", "poller": "poller", "redis": "redis"}  # part → process of the stack


class EnvoyContender:
    """Envoy alone, with the project's Envoy file from which the router is removed."""

    parts: tuple[str, ...] = ()

    def __init__(self, policy: str) -> None:
        self.name = f"envoy:{policy}"
        name, weighted, _ = policy.partition("_weighted")
        weights = ", replicas weighted by their true speeds" if weighted else ""
        self.about = f"Envoy's own {name.upper()}, no router{weights}"
        self._policy = policy
        self._weighted = bool(weighted)

    @asynccontextmanager
    async def running(
        self, fleet: ComparedFleet, servers: Servers, directory: Path, seed: int
    ) -> AsyncIterator[Front]:
        ports = pick_ports({"envoy": 0, "admin": 0})
        admin = f"http://127.0.0.1:{ports['admin']}"

        async def complaints(requests: Requests) -> list[str]:
            found = await replica_complaints(admin, len(servers))
            lines = (await get_text(f"{admin}/clusters") or "").splitlines()
            sent = [int(line.split("::")[-1]) for line in lines if "::rq_total::" in line]
            # Each worker of Envoy takes turns on its own: counts may differ by 1 per worker.
            uneven = max(sent, default=0) - min(sent, default=0) > _WORKERS
            if self._policy == "round_robin" and uneven:
                found.append(f"round robin was uneven: it sent the replicas {sent} requests")
            return found

        async with await start_envoy(self._bootstrap(ports, fleet, servers), admin, directory):
            yield Front(f"http://127.0.0.1:{ports['envoy']}", complaints)

    def _bootstrap(
        self, ports: Mapping[str, int], fleet: ComparedFleet, servers: Servers
    ) -> Bootstrap:
        bootstrap = addressed(
            listen=f"127.0.0.1:{ports['envoy']}",
            admin=f"127.0.0.1:{ports['admin']}",
            routers=[],
            replicas=servers.values(),
        )
        resources = bootstrap["static_resources"]
        clusters = {cluster["name"]: cluster for cluster in resources["clusters"]}
        replicas = clusters["replicas"]
        replicas["load_balancing_policy"] = _balancing(self._policy)
        (group,) = replicas["load_assignment"]["endpoints"]
        if self._weighted:
            for member, weight in zip(group["lb_endpoints"], weights(fleet, servers), strict=True):
                member["load_balancing_weight"] = weight
        resources["clusters"] = [replicas]
        drop_ext_proc(bootstrap)
        return bootstrap


async def start_envoy(bootstrap: Bootstrap, admin: str, directory: Path) -> Process:
    """Starts an Envoy that names the replica in each response; raises ProcessError."""
    config, log = directory / "envoy.yaml", directory / "envoy.log"
    name_replicas(bootstrap)
    add_access_log(bootstrap, directory / "access.log")
    config.write_text(yaml.safe_dump(bootstrap, sort_keys=False))
    argv, ready = envoy_command(config, _WORKERS), answers(f"{admin}/ready")
    return await Process.start("envoy", argv, log=log, ready=ready)


def name_replicas(bootstrap: Bootstrap) -> None:
    """Makes Envoy add ``x-served-by`` to each response. Simulated replicas add it themselves, but
    vLLM does not."""
    manager_of(bootstrap)["route_config"]["response_headers_to_add"] = [
        {
            "header": {"key": "x-served-by", "value": "%UPSTREAM_REMOTE_ADDRESS%"},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
    ]


def weights(fleet: ComparedFleet, servers: Servers) -> list[int]:
    """Weights of the servers, in the order of ``servers``, proportional to their speeds."""
    fastest = max(fleet.speeds.values())
    return [max(round(_FASTEST * fleet.speeds[name] / fastest), 1) for name in servers]


def _balancing(policy: str) -> dict[str, Any]:
    kind = f"type.googleapis.com/envoy.extensions.load_balancing_policies.{_TYPES[policy]}"
    name = f"envoy.load_balancing_policies.{_TYPES[policy].partition('.')[0]}"
    return {
        "policies": [{"typed_extension_config": {"name": name, "typed_config": {"@type": kind}}}]
    }


async def replica_complaints(admin: str, replicas: int) -> list[str]:
    """Problems in Envoy's statistics that make a run wrong: retries, missing replicas, …"""
    stats = await envoy_stats(admin)
    if not stats:
        return [f"Envoy's statistics are missing: {admin}/stats does not answer"]
    found = []
    healthy = stats.get("cluster.replicas.membership_healthy", 0)
    if healthy != replicas:
        found.append(f"Envoy uses {healthy} of {replicas} replicas")
    for name in ("upstream_rq_retry", "upstream_rq_pending_overflow", "upstream_cx_connect_fail"):
        if count := stats.get(f"cluster.replicas.{name}", 0):
            found.append(f"Envoy counts {count} {name}")
    return found


async def envoy_stats(admin: str) -> dict[str, int]:
    lines = (await get_text(f"{admin}/stats") or "").splitlines()
    pairs = (line.rpartition(": ") for line in lines)
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}


class RouterContender:
    """This router behind Envoy, configured with the profiles of ``ComparedFleet.profiles``."""

    parts = tuple(_PARTS)

    def __init__(self, policy: str) -> None:
        self.name = f"router:{policy}"
        self.about = f"this router's policy {policy}, behind Envoy"
        self._policy = policy

    @asynccontextmanager
    async def running(
        self, fleet: ComparedFleet, servers: Servers, directory: Path, seed: int
    ) -> AsyncIterator[Front]:
        replicas = [
            SimulatedReplica(name, fleet.profiles[name], address=address)
            for name, address in servers.items()
        ]
        async with self._stack(directory, replicas, seed) as stack:
            complaints = partial(self._complaints, stack)
            records = partial(decisions, stack.router_admin)
            parts = {part: stack.process(name) for part, name in _PARTS.items()}
            yield Front(stack.url, complaints, records, parts)

    def _stack(self, directory: Path, replicas: Sequence[SimulatedReplica], seed: int) -> Stack:
        settings: dict[str, dict[str, object]] = {
            "route": {"policy": self._policy, "seed": seed},
            "poll": {"interval_s": poll_interval(self._policy)},
            "serve": {"decisions_kept": _DECISIONS_KEPT},
        }
        return _NamingStack(directory, replicas, settings)

    async def _complaints(self, stack: Stack, requests: Requests) -> list[str]:
        found = await replica_complaints(stack.envoy_admin, len(stack.replicas))
        records = await decisions(stack.router_admin)
        decided = {record["request_id"] for record in records}
        stats = await envoy_stats(stack.envoy_admin)
        without_answer = stats.get("http.openai.ext_proc.failure_mode_allowed", 0)
        counts = {
            "bypassed the router": sum(
                request["request_id"] not in decided for request in requests
            ),
            "were decided by another policy": sum(
                record["policy"] != self._policy for record in records
            ),
            "were decided by a fallback": sum(bool(record["fallback"]) for record in records),
            "went on without the router's answer": without_answer,
            "were served by another replica than the router chose": sum(
                record["outcome"]["served_by"] not in (None, record["replica"])
                for record in records
            ),
        }
        return found + [f"{count} requests {event}" for event, count in counts.items() if count]


class ObservedContender(RouterContender):
    """Envoy with a policy of its own, observed by a router."""

    def __init__(self, policy: str) -> None:
        super().__init__(policy)
        self.name = f"observed:{policy}"
        self.about = f"Envoy's own {policy.upper()}, observed by this router"

    def _stack(self, directory: Path, replicas: Sequence[SimulatedReplica], seed: int) -> Stack:
        settings: dict[str, dict[str, object]] = {
            "route": {"seed": seed},
            "serve": {"mode": "observe", "decisions_kept": _DECISIONS_KEPT},
        }
        stack = _ObservedStack(directory, replicas, settings)
        stack.policy = self._policy
        return stack

    async def _complaints(self, stack: Stack, requests: Requests) -> list[str]:
        found = await replica_complaints(stack.envoy_admin, len(stack.replicas))
        records = await decisions(stack.router_admin)
        seen = {record["request_id"] for record in records if record["observed"]}
        missed = sum(request["request_id"] not in seen for request in requests)
        return [*found, f"{missed} requests were not observed"] if missed else found


class _NamingStack(Stack):
    """Stack whose Envoy names the replica in each response."""

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        name_replicas(bootstrap)
        return bootstrap


class _ObservedStack(_NamingStack):
    template = _OBSERVE
    policy = "least_request"  # of Envoy

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        _, replicas = bootstrap["static_resources"]["clusters"]
        replicas["load_balancing_policy"] = _balancing(self.policy)
        return bootstrap
