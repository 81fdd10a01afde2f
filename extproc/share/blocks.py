"""Updates of replicas' KV blocks in Redis: pollers write them, and every router reads them.

For each replica, Redis stores a list: a whole update, which has all blocks, and later updates.
"""

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from extproc.fleet.held_blocks import BlockUpdate, HeldBlocks, pack, unpack
from extproc.ground.clock import monotonic
from extproc.share.connection import Keys, in_time
from extproc.share.envelope import EnvelopeKind, Skips
from extproc.share.reader import ChannelReader, keys_after

LIFE_S = 3600  # life of a replica's blocks in Redis, from the last update on
_READ_AGAIN_S = 1.0  # shortest time between two reads of a replica's blocks

# KEYS: a replica's list. ARGV: life in s, channel, update (empty: same as the whole update), whole
# update (empty: none is due). Publishes the update. Returns 1 if Redis has stored the update, and 0
# if there is no list to append it to, or Redis refuses writes.
_WRITE = """
local stored
if ARGV[4] ~= '' then
  redis.pcall('DEL', KEYS[1])
  stored = redis.pcall('RPUSH', KEYS[1], ARGV[4])
else
  stored = redis.pcall('RPUSHX', KEYS[1], ARGV[3])
end
redis.pcall('EXPIRE', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[2], ARGV[3] ~= '' and ARGV[3] or ARGV[4])
return (stored == 0 or (type(stored) == 'table' and stored.err)) and 0 or 1
"""


class ReplicaBlockUpdate(Struct, array_like=True, frozen=True):
    """Update of one replica's blocks."""

    replica: str  # ip:port
    update: BlockUpdate


BLOCKS = EnvelopeKind("blocks", ReplicaBlockUpdate, pack, unpack)


class BlockWriter:
    """Writes block updates for the pool's routers."""

    def __init__(self, redis: Redis, pool: str) -> None:
        self._redis = redis
        self._keys = Keys(pool)

    async def write(
        self, updates: Mapping[str, tuple[BlockUpdate, BlockUpdate | None]]
    ) -> set[str]:
        """Writes updates in one round trip: replica → its update and, if due, a whole update.

        Returns the replicas whose next update must be whole, because Redis lacks this update.
        """
        async with self._redis.pipeline(transaction=False) as pipe:
            for replica, (update, whole) in updates.items():
                pipe.eval(
                    _WRITE,
                    1,
                    *(self._keys.blocks + replica, LIFE_S, self._keys.blocks_channel),
                    b"" if update is whole else BLOCKS.seal(ReplicaBlockUpdate(replica, update)),
                    BLOCKS.seal(ReplicaBlockUpdate(replica, whole)) if whole else b"",
                )
            stored = await in_time(pipe.execute())
        return {
            replica for replica, is_stored in zip(updates, stored, strict=True) if not is_stored
        }

    async def save(self, replica: str, data: bytes) -> None:
        """Stores the position in a replica's event stream, for the next poller."""
        await in_time(self._redis.set(self._keys.kv_stream + replica, data, ex=LIFE_S))

    async def load(self, replica: str) -> bytes:
        """Returns the position that a poller saved last, or empty bytes if none was saved."""
        data: Any = await in_time(self._redis.get(self._keys.kv_stream + replica))
        return data or b""


class BlockReader(ChannelReader[ReplicaBlockUpdate]):
    """Yields block updates that :class:`HeldBlocks` can apply next. The caller must apply each
    update before asking for the next one."""

    def __init__(
        self, redis: Redis, pool: str, held: HeldBlocks, skips: Skips | None = None
    ) -> None:
        super().__init__(redis, pool, Keys(pool).blocks_channel, skips)
        self._held = held
        self._read_at: dict[str, float] = {}

    async def _found(self) -> AsyncIterator[ReplicaBlockUpdate]:
        for key in await keys_after(self._redis, self._keys.blocks):
            async for change in self._stored(key):
                yield change

    async def _pushed(self, data: bytes) -> AsyncIterator[ReplicaBlockUpdate]:
        """Yields the pushed update, or the stored updates if the reader missed earlier updates."""
        change = self._skips.open(self._channel, data, BLOCKS)
        if change is None:
            return
        key = self._keys.blocks + change.replica
        if self._held.follows(change.replica, change.update):
            yield change
        elif monotonic() - self._read_at.get(key, -math.inf) >= _READ_AGAIN_S:
            async for stored in self._stored(key):
                yield stored

    async def _stored(self, key: str) -> AsyncIterator[ReplicaBlockUpdate]:
        """Yields those updates in a replica's list that follow the last applied update."""
        self._read_at[key] = monotonic()
        try:
            found: Any = await in_time(self._redis.lrange(key, 0, -1))
        except ResponseError as error:  # the key holds no list
            self._skips.garbage(key, error)
            return
        for data in found:
            change = self._skips.open(key, data, BLOCKS)
            if change and self._held.follows(change.replica, change.update):
                yield change
