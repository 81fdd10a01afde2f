"""Whether Envoy knows every worker of the router."""

from collections import defaultdict

from envoy_data_plane.envoy.config.cluster.v3 import Cluster

from extproc.check.envoy_file import EnvoyFile, Part
from extproc.check.finding import Finding, Level

_NAME = "workers_are_listed"


def workers_are_listed(file: EnvoyFile, workers: int) -> list[Finding]:
    """One finding for each router cluster that lists fewer ports than a router has workers.

    Nothing where the router is one process, or the file does not list the members.
    """
    clusters = file.router_clusters if workers > 1 else []
    listed = [(part, ports) for part in clusters for ports in _ports(part.message).values()]
    short = [_short(part, ports, workers) for part, ports in listed if len(ports) < workers]
    if short or not listed:
        return short
    return [Finding(_NAME, Level.OK, "", f"All {workers} workers of the router are listed.")]


def _ports(cluster: Cluster) -> dict[str, set[int]]:
    """The ports listed for each host."""
    ports: defaultdict[str, set[int]] = defaultdict(set)
    groups = cluster.load_assignment.endpoints if cluster.load_assignment else []
    for member in (one.endpoint for group in groups for one in group.lb_endpoints):
        address = member.address.socket_address if member and member.address else None
        if address:
            ports[address.address].add(address.port_value or 0)
    return ports


def _short(part: Part[Cluster], ports: set[int], workers: int) -> Finding:
    first = min(ports)
    return Finding(
        _NAME,
        Level.WARNING,
        part.where,
        f"cluster {part.message.name!r} lists {len(ports)} of {workers} workers "
        "(serve.workers): the others get no request. List the ports "
        f"{first} to {first + workers - 1}, each as an endpoint",
    )
