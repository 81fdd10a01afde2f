"""Routers' digests in Redis: each writes its own, and hears of all.

Of Redis being away the reader of replica states logs; here it is only lived with.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.utils import str_if_bytes

from extproc.backoff import Backoff
from extproc.fleet.digest import Digest, Kind, decode
from extproc.store.connection import in_time
from extproc.store.keys import digests_channel, router_key, router_pattern
from extproc.store.read import Garbage, keys_like, pushed
from extproc.store.replicas import RECONNECT_FIRST_S, RECONNECT_MOST_S

_LIFE_MS = 2000
"""Of a digest in Redis; a whole one comes every half second."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A digest, as it was pushed or as it was found."""

    digest: Digest
    age: float = 0.0
    """Seconds that Redis has had it, where it was found there."""


@dataclass(frozen=True, slots=True)
class Connected:
    """From now on nothing is missed; what is in Redis comes first."""


@dataclass(frozen=True, slots=True)
class CutOff:
    """Redis cannot be heard."""


News = Heard | Connected | CutOff


class DigestWriter:
    """Writes one router's digests and tells the others of the pool."""

    def __init__(self, redis: Redis, pool: str) -> None:
        self._redis = redis
        self._pool = pool

    async def send(self, digest: Digest) -> None:
        """Push a digest; keep a whole one for whoever comes later, and none of one that stops.

        A full Redis keeps none, and still pushes.

        Raises:
            RedisError: Redis did not push it.
        """
        data, key = digest.encode(), router_key(self._pool, digest.router)
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            if digest.kind is Kind.WHOLE:
                pipe.set(key, data, px=_LIFE_MS)
            elif digest.kind is Kind.FAREWELL:
                pipe.delete(key)
            pipe.publish(digests_channel(self._pool), data)
            *_, pushed = await pipe.execute(raise_on_error=False)
        if isinstance(pushed, RedisError):
            raise pushed


class DigestReader:
    """Hears of every router's digests."""

    def __init__(self, redis: Redis, pool: str, random: Random) -> None:
        self._redis = redis
        self._pool = pool
        self._backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MOST_S, random)
        self._garbage = Garbage()

    async def news(self) -> AsyncGenerator[News]:
        """Yield what is in Redis, then every digest as it is pushed, for ever.

        While Redis is away it yields :class:`CutOff` after each attempt.
        """
        while True:
            try:
                async with aclosing(self._connected()) as news:
                    async for one in news:
                        yield one
            except (RedisError, OSError):
                yield CutOff()
                await asyncio.sleep(self._backoff.next())

    async def _connected(self) -> AsyncGenerator[News]:
        channel = digests_channel(self._pool)
        async with aclosing(pushed(self._redis, channel)) as pushes:
            async for data in pushes:
                if data is None:
                    found = await self._found()
                    self._backoff.reset()
                    yield Connected()
                    for one in found:
                        yield one
                elif (digest := self._digest(channel, data)) is not None:
                    yield Heard(digest)

    async def _found(self) -> list[Heard]:
        keys = sorted(map(str_if_bytes, await keys_like(self._redis, router_pattern(self._pool))))
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.get(key)
                pipe.pttl(key)
            answers = await pipe.execute(raise_on_error=False)
        found = []
        for key, data, left in zip(keys, answers[::2], answers[1::2], strict=True):
            told = isinstance(data, bytes) and isinstance(left, int)
            if told and (digest := self._digest(key, data)) is not None:
                found.append(Heard(digest, max(_LIFE_MS - left, 0) / 1000))
        return found

    def _digest(self, source: str, data: bytes) -> Digest | None:
        """None for garbage."""
        try:
            return decode(data)
        except ValueError as error:
            self._garbage.skipped(source, error)
            return None
