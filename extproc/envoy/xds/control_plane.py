"""``extproc xds``: the control plane's parts, put together and run."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack, aclosing
from random import Random

from extproc.config import Config
from extproc.envoy.xds.catalog import ENDPOINTS, Catalog
from extproc.envoy.xds.endpoints import PoolMembers, load_assignment
from extproc.envoy.xds.resources import Resources, watched
from extproc.envoy.xds.server import XdsServer
from extproc.ground.files import Watched
from extproc.ground.runtime import until_signalled
from extproc.replica_state import TTL_S
from extproc.share.connection import connect
from extproc.share.replicas import StateReader

logger = logging.getLogger(__name__)

_SETTLE_S = 0.05
"""Changes that come together are told together."""
_LOOK_EVERY = 1.0
"""Seconds between two looks for silent replicas, at the Envoy file, and at Redis."""
_CUT_OFF_S = 3
"""Without Redis for so long, health checks are told: another instance may have it."""
_SEND_AWAY_S = 5
"""So often streams are ended from then on: the first time, Envoy's health checks have noticed."""


async def run_xds(config: Config) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        OSError: the address cannot be listened on.
        ValueError: the Envoy file cannot be read or is not valid, or the configuration keeps state
            in memory.
    """
    if config.state == "memory":
        raise ValueError(
            "state is 'memory': only the router knows the replicas; "
            "to tell Envoy of them too, set it to 'redis' and run 'extproc poll'"
        )
    catalog, changed = Catalog(), asyncio.Event()
    configs = config.each_pool
    pools = {one.pool: PoolMembers() for one in configs}
    catalog.replace(ENDPOINTS, dict.fromkeys(pools))
    path = config.xds.envoy_file
    file = None if path is None else watched(path, config.pool)
    if file is not None:
        catalog.replace_all(file.read())
    server = XdsServer(catalog, config.xds)
    async with AsyncExitStack() as stack:
        port = await server.start(config.xds.listen)
        stack.push_async_callback(server.stop)
        readers = {}
        for one in configs:
            redis = await stack.enter_async_context(connect(one.redis, one.pool))
            readers[one.pool] = StateReader(redis, one.pool, Random())
        parts = [
            *(_follow(reader, pools[pool], changed) for pool, reader in readers.items()),
            _look(pools, TTL_S, changed, file, catalog),
            _serve_endpoints(pools, catalog, changed),
            _tell_health(readers.values(), server),
        ]
        logger.info("xds ready", extra={"port": port, "pool": ", ".join(pools)})
        await until_signalled(*parts)


async def _follow(reader: StateReader, members: PoolMembers, changed: asyncio.Event) -> None:
    """Brings every change that pollers write to a pool into its members, for ever."""
    async with aclosing(reader.changes()) as changes:
        async for change in changes:
            if members.apply(change):
                changed.set()


async def _tell_health(readers: Collection[StateReader], server: XdsServer) -> None:
    """Has Envoy move to an instance that hears of changes, if there is one.

    Nobody knows whether there is. So what is known here is served all the same, to whoever comes:
    if all are cut off, Envoy finds none healthy, asks any, and gets the newest there is. Only the
    streams do not last, for Envoy would never look elsewhere by itself.
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


async def _look(
    pools: Mapping[str, PoolMembers],
    ttl_s: float,
    changed: asyncio.Event,
    file: Watched[Resources] | None,
    catalog: Catalog,
) -> None:
    """Looks for silent replicas and at the Envoy file, for ever."""
    while True:
        await asyncio.sleep(_LOOK_EVERY)
        for pool, members in pools.items():
            if silent := members.drop_silent(ttl_s):
                extra = {"replicas": ", ".join(silent), "pool": pool}
                logger.info("replicas left: nothing was heard of them", extra=extra)
                changed.set()
        if file is not None and (resources := file.news()) is not None:
            catalog.replace_all(resources)


async def _serve_endpoints(
    pools: Mapping[str, PoolMembers], catalog: Catalog, changed: asyncio.Event
) -> None:
    while True:
        await changed.wait()
        await asyncio.sleep(_SETTLE_S)
        changed.clear()
        catalog.replace(
            ENDPOINTS,
            {
                pool: None if (known := members.current) is None else load_assignment(pool, known)
                for pool, members in pools.items()
            },
        )
