"""``extproc eds``: tells Envoy the replicas that pollers see, and their health."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import lru_cache
from random import Random

from betterproto2 import encode_varint
from envoy_data_plane.envoy.config.core.v3 import Address, HealthStatus, SocketAddress
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)

from extproc.config import Config
from extproc.envoy.eds_server import Catalog, EdsServer
from extproc.fleet.members import Silence
from extproc.ground.address import split_address
from extproc.ground.clock import Clock, monotonic
from extproc.ground.runtime import until_signalled
from extproc.replica_state import TTL_S, ReplicaState
from extproc.share.connection import connect
from extproc.share.lists import Put
from extproc.share.replicas import Change, Removed, Snapshot, StateReader

logger = logging.getLogger(__name__)

_SETTLE_S = 0.05  # changes within it reach Envoy together
_LOOK_EVERY = 1.0  # seconds between two looks for silent replicas, and at Redis
_CUT_OFF_S = 3  # seconds without Redis until health checks fail: another instance may have it
_SEND_AWAY_S = 5  # seconds between two ends of all streams: longer than health checks take to fail
_ENDPOINTS = bytes([2 << 3 | 2])  # tag of ``endpoints`` in ClusterLoadAssignment; a length follows


async def run_eds(config: Config) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        OSError: the address cannot be listened on.
        ValueError: the configuration keeps state in memory.
    """
    if config.state == "memory":
        raise ValueError(
            "state is 'memory': only the router knows the replicas; "
            "to tell Envoy of them too, set it to 'redis' and run 'extproc poll'"
        )
    pools = {one.pool: PoolMembers() for one in config.each_pool}
    catalog, changed = Catalog(dict.fromkeys(pools)), asyncio.Event()
    server = EdsServer(catalog, config.eds)
    async with AsyncExitStack() as stack:
        port = await server.start(config.eds.listen)
        stack.push_async_callback(server.stop)
        readers = []
        for one in config.each_pool:
            redis = await stack.enter_async_context(connect(one.redis, one.pool))
            readers.append(StateReader(redis, one.pool, Random()))
        logger.info("eds ready", extra={"port": port, "pool": ", ".join(pools)})
        await until_signalled(
            *(_follow(*each, changed) for each in zip(readers, pools.values(), strict=True)),
            _drop_silent(pools, changed),
            _serve(pools, catalog, changed),
            _tell_health(readers, server),
        )


async def _follow(reader: StateReader, members: "PoolMembers", changed: asyncio.Event) -> None:
    async with aclosing(reader.changes()) as changes:
        async for change in changes:
            if members.apply(change):
                changed.set()


async def _tell_health(readers: Collection[StateReader], server: EdsServer) -> None:
    """Sends Envoy to an instance that still hears from Redis, if there is one.

    No instance knows of the others. So it serves its last list to every Envoy that comes: if all
    are cut off, Envoy finds none healthy, asks any, and gets the newest list there is. Only the
    streams are ended again and again, since Envoy would never leave by itself.
    """
    away_s = 0
    while True:
        await asyncio.sleep(_LOOK_EVERY)
        away_s = away_s + 1 if any(reader.lost for reader in readers) else 0
        if away_s == _CUT_OFF_S:
            logger.warning("cut off from redis: envoy is sent to other instances")
        await server.report(serving=away_s < _CUT_OFF_S)
        if away_s > _CUT_OFF_S and (away_s - _CUT_OFF_S) % _SEND_AWAY_S == 0:
            server.send_away()


async def _drop_silent(pools: Mapping[str, "PoolMembers"], changed: asyncio.Event) -> None:
    while True:
        await asyncio.sleep(_LOOK_EVERY)
        for pool, members in pools.items():
            if silent := members.drop_silent(TTL_S):
                extra = {"replicas": ", ".join(silent), "pool": pool}
                logger.info("replicas left: nothing was heard of them", extra=extra)
                changed.set()


async def _serve(
    pools: Mapping[str, "PoolMembers"], catalog: Catalog, changed: asyncio.Event
) -> None:
    while True:
        await changed.wait()
        await asyncio.sleep(_SETTLE_S)
        changed.clear()
        for pool, members in pools.items():
            if members.current is not None:
                catalog.put(pool, load_assignment(pool, members.current))


class PoolMembers:
    """The health of a pool's replicas, by the rules that routers have for their fleets."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self.current: dict[str, HealthStatus] | None = None
        """Health by ``ip:port``; None until the first replica is heard of: a Redis that was just
        started holds none yet, and Envoy keeps those it has."""
        self._clock = clock
        self._silence = Silence(clock())

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
        self.current = self.current or {}
        before, self.current[state.id] = self.current.get(state.id), _health(state)
        return self.current[state.id] != before

    def _remove(self, replica: str) -> bool:
        self._silence.forget(replica)
        return (self.current or {}).pop(replica, None) is not None


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
