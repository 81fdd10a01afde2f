"""Replicas of a stack for servers that run already."""

from collections.abc import Mapping

from extproc.lab.harness.stack import SimulatedReplica


def attached_replicas(
    servers: Mapping[str, str], profiles: Mapping[str, str]
) -> list[SimulatedReplica]:
    """``servers`` maps names to ``ip:port``; ``profiles`` maps names to hardware profiles."""
    return [
        SimulatedReplica(name, profiles[name], address=address) for name, address in servers.items()
    ]
