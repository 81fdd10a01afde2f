"""Routers' digests in Redis: each writes its own, and hears of all."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

from extproc.fleet.digest import Digest, Kind, decode
from extproc.share.connection import in_time
from extproc.share.keys import Keys
from extproc.share.read import Follower, keys_after

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
        self._keys = Keys(pool)

    async def send(self, digest: Digest) -> None:
        """Push a digest; keep a whole one for whoever comes later, and none of one that stops.

        A full Redis keeps none, and still pushes.
        """
        data, key = digest.encode(), self._keys.router + digest.router
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            if digest.kind is Kind.WHOLE:
                pipe.set(key, data, px=_LIFE_MS)
            elif digest.kind is Kind.FAREWELL:
                pipe.delete(key)
            pipe.publish(self._keys.digests, data)
            *_, pushed = await pipe.execute(raise_on_error=False)
        if isinstance(pushed, RedisError):
            raise pushed


class DigestReader(Follower[News]):
    """Hears of every router's digests."""

    def news(self) -> AsyncGenerator[News]:
        """What is in Redis, then every digest as it is pushed, for ever.

        While Redis is away it yields :class:`CutOff` after each attempt.
        """
        return self._follow(self._keys.digests)

    def _cut_off(self, error: Exception) -> Iterable[News]:
        return [CutOff()]

    async def _pushed(self, data: bytes) -> Iterable[News]:
        digest = self._garbage.read(self._keys.digests, decode, data)
        return [Heard(digest)] if digest else ()

    async def _found(self) -> AsyncIterator[News]:
        keys = await keys_after(self._redis, self._keys.router)
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.get(key)
                pipe.pttl(key)
            answers = await pipe.execute(raise_on_error=False)
        yield Connected()
        for key, data, left in zip(keys, answers[::2], answers[1::2], strict=True):
            told = isinstance(data, bytes) and isinstance(left, int)
            if told and (digest := self._garbage.read(key, decode, data)):
                yield Heard(digest, max(_LIFE_MS - left, 0) / 1000)
