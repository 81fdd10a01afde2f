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
from extproc.share.envelope import EnvelopeKind, Skips, sealed_list
from extproc.share.lists import PUT, PUT_LISTED, KnownLists, Put, lists_of, sealed, sealed_lists
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


class Removed(Struct, array_like=True, frozen=True):
    """A replica left the pool."""

    id: str


Change = Snapshot | Put | Removed

REMOVED = EnvelopeKind("removed", Removed)

# KEYS: of the states, then of their lists. ARGV: number of states, TTL in ms of these, and of
# lists, channel, values of the states, values of the lists (none: Redis should have them). Returns
# 1, and does nothing else, if Redis lacks a list. A full Redis refuses values, and still passes
# them on.
_PUT = f"""
local states, refused = tonumber(ARGV[1])
for i = states + 1, #KEYS do
  if ARGV[4 + i] then
    local set = redis.pcall('SET', KEYS[i], ARGV[4 + i], 'PX', ARGV[3])
    if set.err then refused = set end
  elseif redis.call('PEXPIRE', KEYS[i], ARGV[3]) == 0 then
    return 1
  end
end
for i = 1, states do
  local set = redis.pcall('SET', KEYS[i], ARGV[4 + i], 'PX', ARGV[2])
  if set.err then refused = set end
end
for first = 1, states, {_IN_A_MESSAGE} do
  local last = math.min(first + {_IN_A_MESSAGE} - 1, states)
  local head = '\\220' .. string.char(0, last - first + 1)  -- sealed_list
  redis.call('PUBLISH', ARGV[4], head .. table.concat(ARGV, '', 4 + first, 4 + last))
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
    """Writes replica states, which live for ``ttl_s`` seconds, and tells the pool's routers: in one
    round trip, or two where Redis lacks a list.

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
        named = {lists_of(state) for state in states if state.adapters}
        lists = {self._keys.lists + name: value for name, value in map(sealed_lists, named)}
        # Twice the life of a state: a reader finds the lists of each state that it found.
        options = (len(keys), self._ttl_ms, 2 * self._ttl_ms, self._keys.changes)
        keys += lists
        async with in_time():
            values = [sealed(state) for state in states]
            if await self._redis.eval(_PUT, len(keys), *keys, *options, *values):
                values = [PUT.seal(Put(state)) for state in states]
                await self._redis.eval(_PUT, len(keys), *keys, *options, *values, *lists.values())

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
        self._lists = KnownLists(redis, pool, self._skips)

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
            left_s = {}
            found = []
            for key, value, left_ms in zip(page, values, left, strict=True):
                if value is not None and (put := self._skips.open(key, value, PUT, PUT_LISTED)):
                    found.append(put)
                    left_s[put.state.id] = left_ms / 1000
            for put in await self._lists.complete(found):
                states.append(put.state)
                ages[put.state.id] = max(put.state.life_s - left_s[put.state.id], 0.0)
        return Snapshot(tuple(states), ages)

    async def _found(self) -> AsyncIterator[Change]:
        snapshot = await self.read()
        self._outage.recovered()
        self._scraped_at = {state.id: state.scraped_at for state in snapshot.states}
        self._lists.keep(self._scraped_at)
        yield snapshot

    async def _pushed(self, data: bytes) -> Iterable[Change]:
        changes = self._skips.open_all(self._channel, data, PUT, PUT_LISTED, REMOVED)
        completed = await self._lists.complete(changes)
        for removed in (one for one in changes if isinstance(one, Removed)):
            self._lists.forget(removed.id)
        return filter(self._is_newer, completed)

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
