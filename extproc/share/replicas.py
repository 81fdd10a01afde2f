"""Replica state in Redis: pollers write it, every router hears of each change.

A state is a value, not an event: the last one wins, and a lost one is repaired by the next.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from msgspec import Struct
from redis.asyncio import Redis

from extproc.replica_state import ReplicaState
from extproc.share.connection import Keys, in_time, outage
from extproc.share.envelope import Kind, Skips, sealed_list
from extproc.share.reader import ChannelReader, keys_after

_IN_A_MESSAGE = 16
"""States at most. To receive a message of one costs every router as much as to read and to apply
the state in it; a message of 16 keeps it from its requests for a millisecond."""
_IN_A_PAGE = 64  # states at most that are read at once


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All states in Redis. It comes first, and again whenever pushes may have been missed."""

    states: tuple[ReplicaState, ...]
    ages: dict[str, float] = field(default_factory=dict, compare=False)
    """Seconds that Redis has had each, by its id and by Redis's clock."""


class Put(Struct, array_like=True, frozen=True):
    """A replica's new state."""

    state: ReplicaState


class Removed(Struct, array_like=True, frozen=True):
    """A replica left the pool."""

    id: str


Change = Snapshot | Put | Removed

PUT = Kind("put", Put, pack=float)  # of numpy's numbers
REMOVED = Kind("removed", Removed)

# KEYS: of the states. ARGV: TTL in ms, channel, values. A full Redis refuses values, and still
# passes them on.
_PUT = f"""
local refused
for i, key in ipairs(KEYS) do
  local set = redis.pcall('SET', key, ARGV[2 + i], 'PX', ARGV[1])
  if set.err then refused = set end
end
for first = 1, #KEYS, {_IN_A_MESSAGE} do
  local last = math.min(first + {_IN_A_MESSAGE} - 1, #KEYS)
  local head = '\\220' .. string.char(0, last - first + 1)  -- sealed_list
  redis.call('PUBLISH', ARGV[2], head .. table.concat(ARGV, '', 2 + first, 2 + last))
end
return refused
"""

# KEYS: states. A key that is missing or holds no string gives nil, as with MGET.
_READ = """
local values, left = {}, {}
for i = 1, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  values[i] = type(value) == 'string' and value
  left[i] = redis.call('PTTL', KEYS[i])
end
return {values, left}
"""


class StateWriter:
    """Writes replica states, which live for ``ttl_s`` seconds, and tells the pool's routers, each
    in one round trip.

    Each method raises RedisError where Redis did not take all of it.
    """

    def __init__(self, redis: Redis, pool: str, ttl_s: float) -> None:
        self._redis = redis
        self._keys = Keys(pool)
        self._ttl_ms = max(1, round(ttl_s * 1000))

    async def put(self, states: Sequence[ReplicaState]) -> None:
        if not states:
            return
        keys = [self._keys.replica + state.id for state in states]
        values = [PUT.seal(Put(state)) for state in states]
        options = (self._ttl_ms, self._keys.changes)
        async with in_time():
            await self._redis.eval(_PUT, len(keys), *keys, *options, *values)

    async def remove(self, replicas: Sequence[str]) -> None:
        if not replicas:
            return
        of = self._keys
        async with in_time(), self._redis.pipeline() as pipe:
            for replica in replicas:
                pipe.delete(*(key + replica for key in (of.replica, of.blocks, of.kv_stream)))
                pipe.publish(of.changes, sealed_list(REMOVED.seal(Removed(replica))))
            await pipe.execute()


class StateReader(ChannelReader[Change]):
    """Reads replica states, and how they change; logs that Redis is away.

    It begins with a snapshot, also after an outage. A state whose life has ended is not pushed: the
    next snapshot lacks it.
    """

    def __init__(self, redis: Redis, pool: str, random: Random, skips: Skips | None = None) -> None:
        super().__init__(redis, pool, random, skips)
        self._channel = self._keys.changes
        self._outage = outage(redis)
        self._scraped_at: dict[str, float] = {}
        """When the states of the snapshot were scraped, while older ones may be pushed."""

    @property
    def lost(self) -> bool:
        return bool(self._outage.problem)

    async def read(self, replicas: Iterable[str] | None = None) -> Snapshot:
        """Returns the states of these replicas that are in Redis now; None: all.

        It reads page by page: to read a thousand at once keeps a router from its requests.
        """
        if replicas is None:
            keys = await keys_after(self._redis, self._keys.replica)
        else:
            keys = [self._keys.replica + replica for replica in replicas]
        states: list[ReplicaState] = []
        ages: dict[str, float] = {}
        for first in range(0, len(keys), _IN_A_PAGE):
            page = keys[first : first + _IN_A_PAGE]
            async with in_time():
                values, left = await self._redis.eval(_READ, len(page), *page)
            for key, value, left_ms in zip(page, values, left, strict=True):
                if value is not None and (put := self._skips.open(key, value, PUT)):
                    states.append(put.state)
                    ages[put.state.id] = max(put.state.life_s - left_ms / 1000, 0.0)
        return Snapshot(tuple(states), ages)

    async def _found(self) -> AsyncIterator[Change]:
        snapshot = await self.read()
        self._outage.works()
        self._scraped_at = {state.id: state.scraped_at for state in snapshot.states}
        yield snapshot

    async def _pushed(self, data: bytes) -> Iterable[Change]:
        changes = self._skips.open_all(self._channel, data, PUT, REMOVED)
        return filter(self._is_newer, changes)

    def _is_newer(self, change: Change) -> bool:
        """Drops what was pushed before the snapshot was read: falling counters mean a restart.

        Times are compared only then, for the next poller of a replica may have another clock.
        """
        if not isinstance(change, Put):
            return True
        return change.state.scraped_at >= self._scraped_at.get(change.state.id, 0.0)

    def _caught_up(self) -> None:
        self._scraped_at.clear()

    def _cut_off(self, error: Exception) -> Iterable[Change]:
        self._outage.failed(error)
        return ()
