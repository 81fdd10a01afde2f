"""The replicas of a pool and their health, as EDS serves them."""

from collections.abc import Mapping
from functools import lru_cache

from betterproto2 import encode_varint
from envoy_data_plane.envoy.config.core.v3 import Address, HealthStatus, SocketAddress
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)

from extproc.fleet.members import Silence
from extproc.ground.address import split_address
from extproc.ground.clock import Clock, monotonic
from extproc.replica_state import ReplicaState
from extproc.share.replicas import Change, Put, Removed, Snapshot

_ENDPOINTS = bytes([2 << 3 | 2])
"""Tag of the field ``endpoints`` of ClusterLoadAssignment; its length follows."""


class PoolMembers:
    """The health of a pool's replicas, by the rules that routers have for their fleets."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._health: dict[str, HealthStatus] = {}
        self._silence = Silence(clock())
        self._known = False

    @property
    def current(self) -> Mapping[str, HealthStatus] | None:
        """Health by ``ip:port``; None until the first replica is heard of.

        A Redis that was just started holds no replica yet, and Envoy keeps those it has.
        """
        return self._health if self._known else None

    def apply(self, change: Change) -> bool:
        """Takes in a change; returns whether it concerns Envoy."""
        match change:
            case Snapshot(states):
                # A replica missing in it is dropped only once it stays silent.
                return True in [self._put(state) for state in states]
            case Put(state):
                return self._put(state)
            case Removed(replica):
                return self._remove(replica)

    def drop_silent(self, after: float) -> list[str]:
        """Removes and returns replicas silent for ``after`` seconds in which others were heard.

        When no replica is heard, pollers or Redis are gone, and the replicas are still there.
        """
        silent = self._silence.silent(after)
        for id_ in silent:
            self._remove(id_)
        return silent

    def _put(self, state: ReplicaState) -> bool:
        self._silence.heard(state.id, self._clock())
        before, health = self._health.get(state.id), _health(state)
        self._health[state.id] = health
        self._known = True
        return health != before

    def _remove(self, replica: str) -> bool:
        self._silence.forget(replica)
        return self._health.pop(replica, None) is not None


def _health(state: ReplicaState) -> HealthStatus:
    """The fallback policy chooses among healthy replicas only; the router's choice reaches all.

    So a draining replica gets new requests only where the router finds no other that could serve.
    """
    if state.draining:
        return HealthStatus.DRAINING
    return HealthStatus.HEALTHY if state.healthy else HealthStatus.UNHEALTHY


def load_assignment(name: str, members: Mapping[str, HealthStatus]) -> bytes:
    """An encoded ``ClusterLoadAssignment``.

    Encoding a member takes a millisecond, and few of a thousand change at a time. So each is
    encoded once: concatenated protobuf messages are one message with the fields of all.
    """
    locality = b"".join(_encoded(id_, health) for id_, health in sorted(members.items()))
    head = bytes(ClusterLoadAssignment(cluster_name=name))
    return head + _ENDPOINTS + encode_varint(len(locality)) + locality


@lru_cache(maxsize=16_384)
def _encoded(id_: str, health: HealthStatus) -> bytes:
    host, port = split_address(id_)
    address = Address(socket_address=SocketAddress(address=host, port_value=port))
    endpoint = LbEndpoint(endpoint=Endpoint(address=address), health_status=health)
    return bytes(LocalityLbEndpoints(lb_endpoints=[endpoint]))
