"""``extproc eds``: tells Envoy the replicas that pollers see."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack, aclosing
from random import Random

from extproc.config import Config
from extproc.envoy.eds_members import PoolMembers, load_assignment
from extproc.envoy.eds_server import Catalog, EdsServer
from extproc.ground.runtime import until_signalled
from extproc.replica_state import TTL_S
from extproc.share.connection import connect
from extproc.share.replicas import StateReader

logger = logging.getLogger(__name__)

_SETTLE_S = 0.05  # changes that come together are told together
_LOOK_EVERY = 1.0  # seconds between two looks for silent replicas, and at Redis
_CUT_OFF_S = 3  # seconds without Redis until health checks fail: another instance may have it
_SEND_AWAY_S = 5
"""Seconds between two ends of all streams; before the first, Envoy's health checks have failed."""


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
        readers = {}
        for one in config.each_pool:
            redis = await stack.enter_async_context(connect(one.redis, one.pool))
            readers[one.pool] = StateReader(redis, one.pool, Random())
        parts = [
            *(_follow(reader, pools[pool], changed) for pool, reader in readers.items()),
            _drop_silent(pools, changed),
            _serve(pools, catalog, changed),
            _tell_health(readers.values(), server),
        ]
        logger.info("eds ready", extra={"port": port, "pool": ", ".join(pools)})
        await until_signalled(*parts)


async def _follow(reader: StateReader, members: PoolMembers, changed: asyncio.Event) -> None:
    """Brings every change that pollers write to a pool into its members, for ever."""
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


async def _drop_silent(pools: Mapping[str, PoolMembers], changed: asyncio.Event) -> None:
    while True:
        await asyncio.sleep(_LOOK_EVERY)
        for pool, members in pools.items():
            if silent := members.drop_silent(TTL_S):
                extra = {"replicas": ", ".join(silent), "pool": pool}
                logger.info("replicas left: nothing was heard of them", extra=extra)
                changed.set()


async def _serve(
    pools: Mapping[str, PoolMembers], catalog: Catalog, changed: asyncio.Event
) -> None:
    while True:
        await changed.wait()
        await asyncio.sleep(_SETTLE_S)
        changed.clear()
        catalog.replace(
            {
                pool: None if (known := members.current) is None else load_assignment(pool, known)
                for pool, members in pools.items()
            }
        )
