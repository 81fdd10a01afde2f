"""News of replicas' KV blocks in Redis: pollers write them, every router hears of each.

Redis keeps, of each replica, all that it held at some time and the news since then.
"""

import math
from collections.abc import AsyncIterator, Iterable, Mapping
from random import Random
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from extproc.fleet.held_blocks import BlockUpdate, is_up_to, pack, unpack
from extproc.ground.clock import Clock
from extproc.share.connection import Keys, in_time
from extproc.share.envelope import EnvelopeKind, Skips
from extproc.share.reader import ChannelReader, keys_after

LIFE_S = 3600  # of a replica's blocks in Redis, from the last news on
_READ_AGAIN_S = 1.0  # between two readings of the same blocks, whatever is missing

# KEYS: blocks. ARGV: life in s, channel, news (empty: they are all that is held), all that is held
# (empty: it is not due). Returns whether later news
# may be appended: they may not where there is nothing to append to, or Redis is full; they are
# passed on all the same.
_TELL = """
local kept
if ARGV[4] ~= '' then
  redis.call('DEL', KEYS[1])
  kept = redis.pcall('RPUSH', KEYS[1], ARGV[4])
else
  kept = redis.pcall('RPUSHX', KEYS[1], ARGV[3])
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[2], ARGV[3] ~= '' and ARGV[3] or ARGV[4])
return (kept == 0 or (type(kept) == 'table' and kept.err)) and 0 or 1
"""

Told = tuple[BlockUpdate, BlockUpdate | None]  # what is new, and all that is held where that is due


class ReplicaBlockUpdate(Struct, array_like=True, frozen=True):
    """News of one replica."""

    replica: str  # ip:port
    update: BlockUpdate


BLOCKS = EnvelopeKind("blocks", ReplicaBlockUpdate, pack, unpack)


class BlockWriter:
    """Tells the pool's routers of replicas' blocks.

    Each method raises RedisError where Redis did not do all of it.
    """

    def __init__(self, redis: Redis, pool: str) -> None:
        self._redis = redis
        self._keys = Keys(pool)

    async def tell(self, news: Mapping[str, Told]) -> set[str]:
        """Tells the news of each replica in one round trip; returns the replicas of which all is to
        be told next: Redis does not have what this follows."""
        if not news:
            return set()
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            for replica, (new, held) in news.items():
                pipe.eval(
                    _TELL,
                    1,
                    *(self._keys.blocks + replica, LIFE_S, self._keys.blocks_channel),
                    b"" if new is held else BLOCKS.seal(ReplicaBlockUpdate(replica, new)),
                    BLOCKS.seal(ReplicaBlockUpdate(replica, held)) if held else b"",
                )
            kept = await pipe.execute()
        return {replica for replica, is_kept in zip(news, kept, strict=True) if not is_kept}

    async def save(self, replica: str, data: bytes) -> None:
        """Keeps what a poller needs to go on from here."""
        async with in_time():
            await self._redis.set(self._keys.kv_stream + replica, data, ex=LIFE_S)

    async def load(self, replica: str) -> bytes:
        """Returns what any poller saved last; empty: nothing."""
        async with in_time():
            data: Any = await self._redis.get(self._keys.kv_stream + replica)
        return data or b""


class BlockReader(ChannelReader[ReplicaBlockUpdate]):
    """Hears of blocks; of each replica, each news follows the one before, or is whole."""

    def __init__(
        self, redis: Redis, pool: str, random: Random, clock: Clock, skips: Skips | None = None
    ) -> None:
        super().__init__(redis, pool, random, skips)
        self._channel = self._keys.blocks_channel
        self._clock = clock
        self._numbers: dict[str, int] = {}  # of the last news of each replica
        self._read_at: dict[str, float] = {}

    def forget(self, replica: str) -> None:
        """Has the next news whole: the last ones were of no use."""
        self._numbers.pop(replica, None)

    async def _found(self) -> AsyncIterator[ReplicaBlockUpdate]:
        self._numbers.clear()
        beginning = self._keys.blocks
        for key in await keys_after(self._redis, beginning):
            for one in await self._read(key.removeprefix(beginning)):
                yield one

    async def _pushed(self, data: bytes) -> Iterable[ReplicaBlockUpdate]:
        """Returns pushed news; all that Redis has where some before them were missed."""
        told = self._skips.open(self._channel, data, BLOCKS)
        if told is None or self._is_old(told):
            return []
        if self._follows(told):
            return [told]
        since = self._clock() - self._read_at.get(told.replica, -math.inf)
        return await self._read(told.replica) if since >= _READ_AGAIN_S else []

    async def _read(self, replica: str) -> Iterable[ReplicaBlockUpdate]:
        """Returns what Redis has of a replica, but for what another poller added to the list."""
        key = self._keys.blocks + replica
        self._read_at[replica] = self._clock()
        try:
            async with in_time():
                found: Any = await self._redis.lrange(key, 0, -1)
        except ResponseError as error:  # it is no list
            self._skips.garbage(key, error)
            return []
        opened = (self._skips.open(key, data, BLOCKS) for data in found)
        return (one for one in opened if one and not self._is_old(one) and self._follows(one))

    def _is_old(self, told: ReplicaBlockUpdate) -> bool:
        known = self._numbers.get(told.replica)
        return known is not None and is_up_to(known, told.update.number)

    def _follows(self, told: ReplicaBlockUpdate) -> bool:
        """Takes news as heard; returns False where some before them are missing."""
        if not told.update.whole and told.update.previous != self._numbers.get(told.replica):
            return False
        self._numbers[told.replica] = told.update.number
        return True
