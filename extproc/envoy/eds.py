"""``extproc eds``: tells Envoy the replicas that pollers know, and their health."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from functools import lru_cache, partial
from typing import Any

from betterproto2 import encode_varint
from envoy_data_plane.envoy.config.core.v3 import Address, HealthStatus, SocketAddress
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from redis.asyncio import Redis
from redis.exceptions import RedisError

from extproc.config import Config
from extproc.envoy.eds_server import EdsServer
from extproc.fleet.members import Staleness
from extproc.ground.address import split_address
from extproc.ground.clock import Clock, monotonic
from extproc.ground.runtime import until_signalled
from extproc.proxy.transport import require_address
from extproc.replica_state import TTL_S, ReplicaState
from extproc.share.assignment import known_pollers
from extproc.share.connection import connect
from extproc.share.envelope import Skips
from extproc.share.replicas import Change, Put, Removed, Snapshot, StateReader

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 1.0  # between checks for stale replicas, and of the connection to Redis
_CUT_OFF_S = 3  # seconds without Redis until this instance fails its health checks
_CLOSE_EVERY_S = 5  # between two closings of all streams; health checks fail within this time
_ENDPOINTS = bytes([2 << 3 | 2])  # protobuf tag of ``endpoints`` in ClusterLoadAssignment


async def run_eds(config: Config) -> None:
    """Tell Envoy the replicas of every pool until SIGTERM or SIGINT.

    Raises:
        OSError: the port is in use.
        ValueError: ``state`` is ``memory``, or a TLS file cannot be used.
    """
    if config.state == "memory":
        raise ValueError(
            "state is 'memory', so only the router knows the replicas: set state to 'redis' and "
            "run 'extproc poll'"
        )
    pools = [pool.pool for pool in config.each_pool]
    server = EdsServer(dict.fromkeys(pools), config.eds)
    require_address(config.eds.listen, "eds")
    async with AsyncExitStack() as stack:
        readers, parts = list[StateReader](), list[Coroutine[Any, Any, None]]()
        for pool in pools:
            redis = await stack.enter_async_context(connect(config.redis, pool))
            reader, members = StateReader(redis, pool), PoolMembers()
            tell = partial(server.put, pool, partial(load_assignment, pool, members.current))
            readers.append(reader)
            parts += [
                _follow(reader, members, tell),
                _notice_empty(redis, pool, members, tell),
                _drop_stale(pool, members, tell),
            ]
        logger.info(
            "eds started: its port opens once it knows the replicas",
            extra={"pool": ", ".join(pools)},
        )
        await until_signalled(*parts, _serve(readers, server, config.eds.listen))


async def _follow(reader: StateReader, members: "PoolMembers", tell: Callable[[], None]) -> None:
    async with aclosing(reader.changes()) as changes:
        async for change in changes:
            if members.apply(change):
                tell()


async def _notice_empty(
    redis: Redis, pool: str, members: "PoolMembers", tell: Callable[[], None]
) -> None:
    """Tell Envoy of a pool without replicas, once living pollers have read every source of it and
    found none. Otherwise an Envoy that starts would wait for the pool's replicas."""
    skips = Skips()
    while not members.current:
        with suppress(RedisError, OSError):
            pollers, _ = await known_pollers(redis, pool, skips)
            if pollers and not any(each.replicas or each.problems for each in pollers.values()):
                tell()
                return
        await asyncio.sleep(_CHECK_EVERY_S)


async def _serve(readers: Collection[StateReader], server: EdsServer, address: str) -> None:
    """Listen once the replicas of any pool are known; then report health.

    Until then Envoy asks other instances, and the closed port fails Kubernetes's readiness probe:
    after an upgrade to a wrong ``redis.url`` the old instances stay.
    """
    await server.known.wait()
    port = await server.start(address)
    try:
        logger.info("eds ready: it knows the replicas", extra={"port": port})
        await _report_health(readers, server)
    finally:
        await server.stop()


async def _report_health(readers: Collection[StateReader], server: EdsServer) -> None:
    """Send Envoy to another instance while this instance has lost Redis.

    To that end health checks fail, and streams are closed again and again, because Envoy never
    leaves a stream by itself. If all instances have lost Redis, Envoy finds no healthy instance and
    uses any instance, so each goes on serving its last list.
    """
    lost_s = 0
    while True:
        await asyncio.sleep(_CHECK_EVERY_S)
        lost_s = lost_s + 1 if any(reader.outage.problem for reader in readers) else 0
        if lost_s == _CUT_OFF_S:
            logger.warning(
                "redis lost: this 'extproc eds' reports unhealthy, so that envoy uses another"
            )
        await server.report(serving=lost_s < _CUT_OFF_S)
        if lost_s > _CUT_OFF_S and (lost_s - _CUT_OFF_S) % _CLOSE_EVERY_S == 0:
            server.close_streams()


async def _drop_stale(pool: str, members: "PoolMembers", tell: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_CHECK_EVERY_S)
        if stale := members.drop_stale(TTL_S):
            logger.info(
                "replicas withdrawn from envoy: their state is stale",
                extra={"replicas": ", ".join(stale), "pool": pool},
            )
            tell()


class PoolMembers:
    """Health of a pool's replicas, by the rules that routers apply to their fleets."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self.current: dict[str, HealthStatus] = {}  # by ``ip:port``
        self._clock = clock
        self._staleness = Staleness(clock())

    def apply(self, change: Change) -> bool:
        """Apply a change; return true if Envoy has to learn of the change.

        False for the snapshot of a Redis that has just started and has no replica yet: an empty
        list would make Envoy drop all its replicas.
        """
        match change:
            case Snapshot(states):
                # A replica missing from a snapshot is dropped only once its state is stale.
                return True in [self._put(state) for state in states]
            case Put(state):
                return self._put(state)
            case Removed(replica):
                return self._remove(replica)

    def drop_stale(self, after_s: float) -> list[str]:
        """Remove and return the replicas without an update for ``after_s`` seconds (see
        :meth:`~extproc.fleet.members.Staleness.stale`)."""
        stale = self._staleness.stale(after_s)
        for id_ in stale:
            self._remove(id_)
        return stale

    def _put(self, state: ReplicaState) -> bool:
        self._staleness.updated(state.id, self._clock())
        before, self.current[state.id] = self.current.get(state.id), _health(state)
        return self.current[state.id] != before

    def _remove(self, replica: str) -> bool:
        self._staleness.forget(replica)
        return self.current.pop(replica, None) is not None


def _health(state: ReplicaState) -> HealthStatus:
    """Return the health that only Envoy's fallback policy obeys: a router may choose any member.

    So a draining replica gets requests only from a router, and only if no other replica can serve.
    """
    if state.draining:
        return HealthStatus.DRAINING
    return HealthStatus.HEALTHY if state.serves else HealthStatus.UNHEALTHY


def load_assignment(name: str, members: Mapping[str, HealthStatus]) -> bytes:
    """Return an encoded ``ClusterLoadAssignment``.

    Encoding a member takes a millisecond, so unchanged members come from a cache. The members'
    bytes are joined: concatenated protobuf messages are one message with the fields of all.
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
