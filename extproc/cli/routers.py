"""Routers that a command asks: a named router, or all routers of the pools, found through Redis."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from extproc.config import Config
from extproc.ground.address import process_address, within_reach
from extproc.ground.text import natural
from extproc.share.connection import address, connect
from extproc.share.digests import living_routers

Snapshot = Mapping[str, Any]  # see observe/dashboard/snapshot.py


@dataclass(slots=True, unsafe_hash=True)
class AskedRouter:
    """Router that a command asks, with its last answer, which does not count in comparisons."""

    admin: str  # address of its admin server: ``host:port`` or a URL
    name: str = ""  # host and port of ``serve.listen``; empty: a router that Redis did not name
    # Last snapshot; empty: the router has sent none yet.
    snapshot: Snapshot = field(default_factory=dict, compare=False)
    # Why the router does not answer now; empty: the router answers.
    error: str = field(default="", compare=False)

    @property
    def title(self) -> str:
        return self.name or self.admin

    def failed(self, error: Exception) -> None:
        self.error = f"router {self.name}: {error}" if self.name else str(error)


async def routers_to_ask(named: str | None, config: Config) -> tuple[list[AskedRouter], list[str]]:
    """Find the routers to ask, at least one.

    Args:
        named: admin address of the only router to ask; None: all routers that Redis names, or the
            router at ``serve.admin`` if Redis names none.

    Returns:
        The routers, sorted by name, and notes on why others are missing.
    """
    own = AskedRouter(named or config.serve.admin)
    if named is not None or config.state != "redis":
        return [own], []
    try:
        pools = await asyncio.gather(*map(_living, config.each_pool))
    except RedisError as error:
        return [own], [f"{error}: asking only the router at {own.admin} (serve.admin)"]
    routers, notes = _within_reach({name: pool[name] for pool in pools for name in pool})
    if not routers:
        which = "within reach" if notes else "of the pool"
        notes.append(
            f"Redis names no router {which}: asking only the router at {own.admin} (serve.admin)"
        )
    return routers or [own], notes


def _within_reach(found: Mapping[str, str]) -> tuple[list[AskedRouter], list[str]]:
    """Return the routers to ask, and notes on the others; ``found``: router name → admin address.

    A router of several pools has a name in each pool, and is asked once.
    """
    routers, notes = dict[str, AskedRouter](), list[str]()
    for name in sorted(found, key=natural):
        process, admin = process_address(name), found[name]
        if within_reach(admin, process):
            routers[admin] = AskedRouter(admin, process)
        else:
            why = f"its serve.admin ({admin}) is on loopback of another machine"
            notes.append(f"router {process} is not asked: {why}")
    return [*routers.values()], [*dict.fromkeys(notes)]


async def _living(config: Config) -> dict[str, str]:
    """Read the admin address of each living router of the pool, by the name of the router.

    Raises:
        RedisError: Redis does not answer, or refuses a command; the message names the server.
    """
    async with connect(config.redis, config.pool) as redis:
        try:
            return await living_routers(redis, config.pool)
        except (RedisError, OSError) as error:
            raise RedisError(
                f"Redis at {address(redis)} (redis.url) does not name the routers: {error}"
            ) from None
