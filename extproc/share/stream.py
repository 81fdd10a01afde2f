"""What routers tell each other piece by piece: a stream in Redis that each adds to and follows."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from random import Random
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.typing import EncodableT, FieldT
from redis.utils import str_if_bytes

from extproc.share.connection import TIMEOUT_S, in_time, reconnecting

_PAGE = 100
"""Entries read at a time: some 5 ms, in which a router does nothing else."""
_BLOCK_MS = round(TIMEOUT_S * 500)
"""How long Redis waits for the next entry before it answers that there is none."""
_LIFE_S = 86_400
"""Of the stream, from the last entry on."""

_NONE = "0-0"
"""The number before the first."""

Fields = dict[FieldT, EncodableT]
_Entry = tuple[bytes | str, dict[bytes, bytes]]


class StreamWriter:
    """Tells the other routers of a pool."""

    def __init__(self, redis: Redis, key: str, most: int) -> None:
        """``most``: entries that Redis keeps, about."""
        self._redis = redis
        self._key = key
        self._most = most

    async def send(self, entries: Sequence[Fields]) -> None:
        """Append entries in one round trip; the oldest go."""
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            for fields in entries:
                pipe.xadd(self._key, fields, maxlen=self._most, approximate=True)
            pipe.expire(self._key, _LIFE_S)
            await pipe.execute()


class StreamReader:
    """Hears what all routers tell."""

    def __init__(self, redis: Redis, key: str, random: Random) -> None:
        self._redis = redis
        self._key = key
        self._backoff = reconnecting(random)

    async def news(self) -> AsyncGenerator[dict[bytes, bytes]]:
        """Yield each entry that Redis has, then each new one.

        While Redis is away it yields nothing; then it goes on, or begins anew where Redis has less
        than was read, and so is another one or lost it.
        """
        after = _NONE
        while True:
            try:
                if _order(await self._last()) < _order(after):
                    after = _NONE
                while True:
                    entries = await self._entries(after)
                    self._backoff.reset()
                    for number, fields in entries:
                        after = str_if_bytes(number)
                        yield fields
                    await asyncio.sleep(0)  # many pages may be there; requests come first
            except (RedisError, OSError):
                await asyncio.sleep(self._backoff.next())

    async def _last(self) -> str:
        """The number of the newest."""
        async with in_time():
            found: Any = await self._redis.xrevrange(self._key, count=1)
        return str_if_bytes(found[0][0]) if found else _NONE

    async def _entries(self, after: str) -> list[_Entry]:
        """Those after that number; where there are none, those that come within a moment."""
        async with in_time():
            found: Any = await self._redis.xread({self._key: after}, count=_PAGE, block=_BLOCK_MS)
        if isinstance(found, dict):  # RESP3: by key a list of lists
            return [entry for entries in found.values() for entry in entries[0]]
        return [entry for _, entries in found for entry in entries]


def _order(number: str) -> list[int]:
    """Of an entry: milliseconds, and a count within them."""
    return [int(part) for part in number.split("-")]
