"""Checks a running Envoy: its configuration, and the members of its clusters."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

import aiohttp

from extproc.config import Config
from extproc.envoy.check import check_envoy
from extproc.envoy.envoy_file import EnvoyFile, destination
from extproc.envoy.finding import Finding, Level
from extproc.envoy.tree import Node
from extproc.ground.address import join_address, with_name

_PATIENCE = aiohttp.ClientTimeout(total=10.0)
_NO_ANSWER = (
    "{}: is Envoy running, and is this its admin address? --envoy-admin takes http://HOST:PORT"
)
_DOWN = ("UNHEALTHY", "TIMEOUT")
_EXPLAINS = {"router_port_matches", "transport_matches", "members_are_replicas"}
"""Rules that, if broken, explain the state of all members of the cluster."""


async def check_live_envoy(url: str, config: Config, replicas: Mapping[str, str]) -> list[Finding]:
    """Check the Envoy with this admin address; ``replicas``: ``ip:port`` → name."""
    where, url = f"Envoy {url}", url.rstrip("/")
    try:
        async with aiohttp.ClientSession(timeout=_PATIENCE, raise_for_status=True) as session:
            dump = await _get(session, f"{url}/config_dump")
            clusters = await _get(session, f"{url}/clusters?format=json")
        hosts = {cluster["name"]: _hosts(cluster) for cluster in clusters["cluster_statuses"]}
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        problem = str(error) or f"no answer within {_PATIENCE.total:g} s"
        return [Finding("envoy", Level.ERROR, where, _NO_ANSWER.format(problem))]
    except (LookupError, TypeError, AttributeError):
        text = _NO_ANSWER.format("this answer is not Envoy's")
        return [Finding("envoy", Level.ERROR, where, text)]
    judged = check_envoy(dump, config)
    explained = {finding.where for finding in judged if finding.rule in _EXPLAINS}
    problems = _check_members(EnvoyFile(dump), hosts, replicas, explained)
    return [Finding("envoy", level, where, text) for level, text in problems] + judged


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json(content_type=None)


def _hosts(cluster: Mapping[str, Any]) -> dict[str, str]:
    """Return why Envoy avoids each member, by ``ip:port``; empty for a healthy member."""
    hosts = {}
    for host in cluster.get("host_statuses", ()):
        if address := host["address"].get("socket_address"):
            health = host.get("health_status", {})
            flags = [flag for flag, value in health.items() if value is True or value in _DOWN]
            hosts[join_address(address["address"], address["port_value"])] = ", ".join(flags)
    return hosts


def _check_members(
    file: EnvoyFile,
    hosts: Mapping[str, Mapping[str, str]],
    replicas: Mapping[str, str],
    explained: Set[str],
) -> Iterator[tuple[Level, str]]:
    """Yield problems of members; ``explained``: places of clusters whose problems are known."""

    def names(clusters: list[Node]) -> list[str]:
        return [
            cluster["name"]
            for cluster in clusters
            if cluster.where not in explained and not destination(cluster)
        ]

    routers, fixed = names(file.router_clusters), names(file.replica_clusters)
    for name in [*routers, *fixed]:
        unhealthy = {host: reasons for host, reasons in hosts.get(name, {}).items() if reasons}
        if name in routers and len(unhealthy) == len(hosts.get(name, {})):
            listed = ", ".join(f"{host}: {reasons}" for host, reasons in unhealthy.items())
            yield (
                Level.ERROR,
                f"cluster {name!r} has no healthy member ({listed or 'it is empty'}): Envoy's "
                "fallback policy serves all requests. Start a router at the address in this "
                "cluster",
            )
            continue
        sender = "Envoy" if name in routers else "Envoy's fallback policy"
        for host, reasons in unhealthy.items():
            title = with_name(host, replicas.get(host, ""))
            yield (
                Level.WARNING,
                f"cluster {name!r}: {title} is unhealthy ({reasons}): {sender} sends no "
                "requests there",
            )
    members = {host: name for name in fixed for host in hosts.get(name, {})}
    for host in members.keys() - replicas.keys():
        yield (
            Level.WARNING,
            f"cluster {members[host]!r} has the member {host}, which no poller knows: only Envoy's "
            "fallback policy sends requests there. Add it to replicas, or remove it from the "
            "cluster",
        )
    for host in replicas.keys() - members.keys() if fixed else ():
        yield (
            Level.ERROR,
            f"no cluster has the member {with_name(host, replicas[host])}, which routers choose: "
            "Envoy ignores that choice. Add it to the cluster, or let 'extproc eds' tell Envoy "
            "the members",
        )
