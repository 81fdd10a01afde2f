"""Drains: a hash in Redis of the replicas that ``extproc replicas drain`` took out of service."""

import asyncio
import logging
from collections.abc import Container, Iterable, Mapping
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from redis.utils import str_if_bytes

from extproc.ground.clock import Clock
from extproc.ground.outage_log import OutageLog
from extproc.share.connection import Keys, in_time
from extproc.share.envelope import EnvelopeKind, Skips

log = logging.getLogger(__name__)

_LIFE_S = 7 * 86_400  # life of the hash in Redis while no poller runs
_EVERY_S = 0.25  # between two reads by a poller: a command takes effect within this time
_REMEMBERED_S = 3600.0  # for which Redis keeps undrains, and drains whose replica left the sources


class Drain(Struct, array_like=True, frozen=True):
    """Command that drains or undrains a replica."""

    drains: bool  # False: an undrain


DRAIN = EnvelopeKind("drain", Drain)


class DrainStore:
    """Reads and writes the commands of one pool, as replica (``ip:port``) → True for a drain, False
    for an undrain."""

    def __init__(self, redis: Redis, pool: str, skips: Skips | None = None) -> None:
        self._redis = redis
        self.key = Keys(pool).drains
        self.refused = OutageLog(
            log,
            "redis refuses a key: 'extproc replicas' has no effect",
            "redis accepts the key again",
            logging.ERROR,
            key=self.key,
        )
        self._skips = skips or Skips()

    async def read(self) -> dict[str, bool]:
        """Returns all commands in Redis, except unreadable values."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(self.key)
            pipe.expire(self.key, _LIFE_S)
            try:
                values, _ = await in_time(pipe.execute())
            except NoPermissionError:
                raise
            except ResponseError:  # a Redis that cannot save its data refuses only EXPIRE
                values = await in_time(self._redis.hgetall(self.key))
        named = {str_if_bytes(key): value for key, value in values.items()}
        found = {key: self._skips.open(key, value, DRAIN) for key, value in named.items()}
        return {key: command.drains for key, command in found.items() if command}

    async def write(self, drains: Mapping[str, bool], only_new: bool = False) -> None:
        """Writes commands; ``only_new``: skips replicas for which Redis has a command already."""
        async with self._redis.pipeline(transaction=False) as pipe:
            put: Any = pipe.hsetnx if only_new else pipe.hset
            for replica, value in drains.items():
                put(self.key, replica, DRAIN.seal(Drain(value)))
            pipe.expire(self.key, _LIFE_S)
            await in_time(pipe.execute())

    async def forget(self, replicas: Iterable[str]) -> None:
        await in_time(self._redis.hdel(self.key, *replicas))


class Drains:
    """A poller's copy of the commands of one pool; the poller restores commands that Redis loses.

    Pollers read the hash in Redis every 0.25 s. They do not subscribe to changes, because the
    channel would also bring them every state that any poller writes.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._drains: dict[str, bool] = {}
        self.listed: Container[str] = ()  # ip:port of the replicas that the sources list now
        self._idle_since: dict[str, float] = {}  # replica → since when its command has no effect

    def has(self, replica: str) -> bool:
        return self._drains.get(replica, False)

    async def follow(self, store: DrainStore, clock: Clock) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.look(store, clock())

    async def look(self, store: DrainStore, now: float) -> None:
        """Reads the commands in Redis, writes back commands that Redis lost, and deletes commands
        that have had no effect for an hour."""
        try:
            await self._look(store, now)
        except NoPermissionError as error:
            store.refused.failed(error, allow=f"~{store.key} +@read +@write")  # rules of an ACL
        except ResponseError as error:  # Redis may still accept states
            store.refused.failed(error)
        except (RedisError, OSError):  # the writer of states logs the outage
            pass
        else:
            store.refused.recovered()

    async def _look(self, store: DrainStore, now: float) -> None:
        there = await store.read()
        known = {**self._drains, **there}
        idle = {name for name, drains in known.items() if not drains or name not in self.listed}
        self._idle_since = {replica: self._idle_since.get(replica, now) for replica in idle}
        old = {name for name, since in self._idle_since.items() if now - since > _REMEMBERED_S}
        if expired := old & there.keys():
            await store.forget(expired)
        # Commands without effect are not restored: another poller may have deleted them as old.
        if lost := known.keys() - there.keys() - idle:
            await store.write({replica: known[replica] for replica in lost}, only_new=True)
        drains = {replica: value for replica, value in known.items() if replica not in old}
        if drains != self._drains:
            self._drains = drains
            self.changed.set()
