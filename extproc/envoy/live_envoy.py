"""Findings on an Envoy that runs: its configuration, and the members of its clusters."""

from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp

from extproc.config import Config
from extproc.envoy.check import check_envoy
from extproc.envoy.envoy_file import EnvoyFile, destination
from extproc.envoy.finding import Finding, Level
from extproc.ground.address import join_address, with_name

_PATIENCE = aiohttp.ClientTimeout(total=10.0)
_SILENT = (
    "{}: is Envoy running, and is that its admin address? --envoy-admin takes http://HOST:PORT"
)
_REFUSED = "it refused what its control plane told and goes on with what it had: {}"
_NO_ROUTER = (
    "cluster {!r} has no healthy member: Envoy's fallback serves, and nothing is routed. Start a "
    "router at its address"
)
_ILL = "cluster {!r}: it holds {} for ill ({}), and sends nothing there"
_STRANGER = (
    "cluster {!r} has {}, which no poller knows: it gets requests by Envoy's fallback alone. Name "
    "it in replicas, or take it out of the cluster"
)
_MISSING = (
    "no cluster has {}, which routers choose: that choice is ignored. Add it to the cluster, or "
    "have 'extproc eds' tell Envoy its members"
)
_DOWN = ("UNHEALTHY", "TIMEOUT")
_CLUSTERS = ("ClustersConfigDump", "static_clusters", "dynamic_active_clusters")
_LISTENERS = ("ListenersConfigDump", "static_listeners", "dynamic_listeners")
_ROUTES = ("RoutesConfigDump", "dynamic_route_configs")  # static routes stand in their listeners


async def check_live_envoy(url: str, config: Config, replicas: Mapping[str, str]) -> list[Finding]:
    """Asks the admin address, and compares with the replicas of routers (``ip:port`` → name)."""
    where = f"Envoy {url}"
    try:
        async with aiohttp.ClientSession(timeout=_PATIENCE, raise_for_status=True) as session:
            dump = await _get(session, f"{url}/config_dump")
            clusters = await _get(session, f"{url}/clusters?format=json")
        tree, refusals = _running(dump), [*_refused(dump)]
        hosts = {one["name"]: _hosts(one) for one in clusters["cluster_statuses"]}
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return [Finding("envoy", Level.ERROR, where, _SILENT.format(error or "no answer"))]
    except (LookupError, TypeError, AttributeError):
        return [Finding("envoy", Level.ERROR, where, _SILENT.format("this is not what Envoy says"))]
    said = [(Level.ERROR, _REFUSED.format(reason)) for reason in refusals]
    said += _members(EnvoyFile(tree), hosts, replicas)
    found = [Finding("envoy", level, where, text) for level, text in said]
    return found + check_envoy(tree, config)


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json(content_type=None)


def _hosts(cluster: Mapping[str, Any]) -> dict[str, str]:
    """``ip:port`` of each member → Envoy's reasons to avoid it."""
    hosts = {}
    for one in cluster.get("host_statuses", ()):
        if address := one["address"].get("socket_address"):
            health = one.get("health_status", {})
            wrong = [flag for flag, is_so in health.items() if is_so is True or is_so in _DOWN]
            hosts[join_address(address["address"], address["port_value"])] = ", ".join(wrong)
    return hosts


def _members(
    file: EnvoyFile, hosts: Mapping[str, Mapping[str, str]], replicas: Mapping[str, str]
) -> Iterator[tuple[Level, str]]:
    routers = [cluster["name"] for cluster in file.router_clusters]
    fixed = [one["name"] for one in file.replica_clusters if not destination(one)]
    for name in [*routers, *fixed]:
        for host, wrong in hosts.get(name, {}).items():
            if wrong:
                titled = with_name(host, replicas.get(host, ""))
                yield Level.WARNING, _ILL.format(name, titled, wrong)
    for name in routers:
        if all(hosts.get(name, {}).values()):
            yield Level.ERROR, _NO_ROUTER.format(name)
    there = {host: name for name in fixed for host in hosts.get(name, {})}
    for host in there.keys() - replicas.keys():
        yield Level.WARNING, _STRANGER.format(there[host], host)
    for host in replicas.keys() - there.keys() if fixed else ():
        yield Level.ERROR, _MISSING.format(with_name(host, replicas[host]))


def _running(dump: dict[str, Any]) -> dict[str, Any]:
    """The configuration in force, as a whole file would have it.

    Raises:
        LookupError, TypeError, AttributeError: not a dump of Envoy.
    """
    (told,) = _parts(dump, "BootstrapConfigDump")
    bootstrap = {key: value for key, value in told["bootstrap"].items() if "dynamic" not in key}
    listeners = [one.get("active_state", one) for one in _entries(dump, *_LISTENERS)]
    bootstrap["static_resources"] = {
        "clusters": [_untyped(one["cluster"]) for one in _entries(dump, *_CLUSTERS)],
        "listeners": [_untyped(one["listener"]) for one in listeners if "listener" in one],
    }
    routes = [one["route_config"] for one in _entries(dump, *_ROUTES) if "route_config" in one]
    return {"bootstrap": bootstrap, "routes": routes}


def _refused(dump: dict[str, Any]) -> Iterator[str]:
    """Reasons why Envoy refused the last version of a resource."""
    for lists in (_LISTENERS, _CLUSTERS, _ROUTES):
        for one in _entries(dump, *lists):
            if "error_state" in one:
                yield str(one["error_state"].get("details", "for no reason that it tells"))


def _entries(dump: dict[str, Any], part: str, *lists: str) -> Iterator[dict[str, Any]]:
    for told in _parts(dump, part):
        for name in lists:
            yield from told.get(name, ())


def _parts(dump: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [one for one in dump["configs"] if one["@type"].endswith(f".{name}")]


def _untyped(resource: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in resource.items() if key != "@type"}
