"""News of replicas' KV blocks in Redis: pollers write them, every router hears of each.

Redis keeps, of each replica, all that it held at some time and the news since then.
"""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from random import Random
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import ResponseError
from redis.utils import str_if_bytes

from extproc.fleet.held_blocks import BlockNews, decode, is_up_to
from extproc.ground.clock import Clock
from extproc.share.connection import in_time
from extproc.share.keys import Keys
from extproc.share.read import Follower, keys_after

LIFE_S = 3600
"""Of a replica's blocks in Redis, from the last news on."""
_READ_AGAIN_S = 1.0
"""Between two readings of the same blocks, whatever is missing."""

# KEYS: a lease, blocks. ARGV: the poller that must hold the lease, life in s, channel, message,
# news (empty: they are all that is held), all that is held (empty: it is not due). Returns whether
# later news may be appended: they may not where there is nothing to append to, or Redis is full;
# they are passed on all the same.
_TELL = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local kept
if ARGV[6] ~= '' then
  kept = redis.pcall('SET', KEYS[2], ARGV[6], 'EX', ARGV[2])
elseif redis.call('EXISTS', KEYS[2]) == 1 then
  kept = redis.pcall('APPEND', KEYS[2], ARGV[5])
  redis.call('EXPIRE', KEYS[2], ARGV[2])
end
redis.call('PUBLISH', ARGV[3], ARGV[4] .. (ARGV[5] ~= '' and ARGV[5] or ARGV[6]))
return (not kept or (type(kept) == 'table' and kept.err)) and 0 or 1
"""

# KEYS: a lease, what is known of a stream. ARGV: the poller that must hold the lease, life in s,
# what it knows.
_SAVE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[2]) end
"""

Told = tuple[BlockNews, BlockNews | None]
"""What is new, and all that is held where that is due."""


class NewsOfReplica(NamedTuple):
    """News of one replica."""

    replica: str
    """``ip:port``."""
    news: BlockNews


class BlockWriter:
    """Tells the pool's routers of blocks of the replicas on which this poller holds the lease.

    Each method raises RedisError where Redis did not do all of it.
    """

    def __init__(self, redis: Redis, pool: str, poller: str) -> None:
        self._redis = redis
        self._keys = Keys(pool)
        self._poller = poller

    async def tell(self, news: Mapping[str, Told]) -> set[str]:
        """Tell the news of each replica in one round trip; returns the replicas of which all is to
        be told next: Redis does not have what this follows."""
        if not news:
            return set()
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            for replica, (new, held) in news.items():
                pipe.eval(
                    _TELL,
                    2,
                    *(self._keys.lease + replica, self._keys.blocks + replica),
                    *(self._poller, LIFE_S, self._keys.blocks_channel, f"{replica}\n"),
                    b"" if new is held else new.encode(),
                    held.encode() if held else b"",
                )
            kept = await pipe.execute()
        return {replica for replica, is_kept in zip(news, kept, strict=True) if not is_kept}

    async def save(self, replica: str, data: bytes) -> None:
        """Keep what a poller needs to go on from here."""
        keys = self._keys.lease + replica, self._keys.kv_stream + replica
        async with in_time():
            await self._redis.eval(_SAVE, 2, *keys, self._poller, LIFE_S, data)

    async def load(self, replica: str) -> bytes:
        """What was saved last, by whichever poller; empty: nothing."""
        async with in_time():
            data: Any = await self._redis.get(self._keys.kv_stream + replica)
        return data or b""


class BlockReader(Follower[NewsOfReplica]):
    """Hears of blocks."""

    def __init__(self, redis: Redis, pool: str, random: Random, clock: Clock) -> None:
        super().__init__(redis, pool, random)
        self._clock = clock
        self._numbers: dict[str, int] = {}
        """Of the last news of each replica."""
        self._read_at: dict[str, float] = {}

    def news(self) -> AsyncGenerator[NewsOfReplica]:
        """What Redis has of each replica, then all news, for ever; each follows the one before of
        the same replica, or is whole.

        While Redis is away it yields nothing.
        """
        return self._follow(self._keys.blocks_channel)

    def forget(self, replica: str) -> None:
        """Its last news were of no use: have the next ones whole."""
        self._numbers.pop(replica, None)

    async def _found(self) -> AsyncIterator[NewsOfReplica]:
        self._numbers.clear()
        beginning = self._keys.blocks
        for key in await keys_after(self._redis, beginning):
            for one in await self._read(key.removeprefix(beginning)):
                yield one

    async def _pushed(self, data: bytes) -> list[NewsOfReplica]:
        """News that were pushed; where some before them were missed, all that Redis has."""
        name, _, encoded = data.partition(b"\n")
        replica = str_if_bytes(name)
        news = self._following(replica, self._keys.blocks_channel, encoded)
        if news is not None:
            return news
        since = self._clock() - self._read_at.get(replica, -math.inf)
        return await self._read(replica) if since >= _READ_AGAIN_S else []

    async def _read(self, replica: str) -> list[NewsOfReplica]:
        """All that Redis has of a replica."""
        key = self._keys.blocks + replica
        self._read_at[replica] = self._clock()
        try:
            async with in_time():
                data: Any = await self._redis.get(key)
        except ResponseError:  # it is something else
            return []
        return self._following(replica, key, data or b"") or []

    def _following(self, replica: str, source: str, data: bytes) -> list[NewsOfReplica] | None:
        """The news among these that were not heard yet; None where some before them are missing."""
        heard = []
        try:
            for news in decode(data):
                known = self._numbers.get(replica)
                if known is not None and is_up_to(known, news.number):
                    continue
                if not news.whole and news.previous != known:
                    return None
                self._numbers[replica] = news.number
                heard.append(NewsOfReplica(replica, news))
        except ValueError as error:
            self._garbage.skipped(source, error)
        return heard
