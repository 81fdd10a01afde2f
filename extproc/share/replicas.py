"""Replica states in Redis: pollers write them, and every router reads each change.

A state is a value, not an event: only the last one counts, and the next state makes up for a loss.

A state with LoRA adapters refers to the lists of its models and adapters by a hash: with 500 names
in every state, each router would receive 8 MB/s. Redis stores each list once, for longer than the
states that refer to the list. If Redis lacks a list, states carry the list.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any

from msgspec import Struct, structs
from redis.asyncio import Redis

from extproc.replica_state import ReplicaState
from extproc.share.connection import Keys, in_time, outage
from extproc.share.envelope import EnvelopeKind, Skips, sealed_list
from extproc.share.reader import ChannelReader, keys_after, stored_values

_MOST_LISTS = 256  # remembered lists; with 500 adapters each they take a reader 20 MB
_MAX_IN_MESSAGE = 16
"""Limit of states in a message. To receive a message costs a router as much as to apply one state;
16 states block the router's event loop for a millisecond."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All states in Redis, read at the start and whenever pushes may have been missed."""

    states: tuple[ReplicaState, ...]
    ages: dict[str, float] = field(default_factory=dict, compare=False)
    """Replica → seconds that its state has been in Redis, on Redis's clock."""


class Put(Struct, array_like=True, frozen=True):
    """New state of a replica."""

    state: ReplicaState
    lists: str = ""  # hash of models and adapters, which the state lacks; empty: the state has them


class Removed(Struct, array_like=True, frozen=True):
    """Replica that left the pool."""

    id: str


class Lists(Struct, array_like=True, frozen=True):
    """Models and adapters of a replica, to which its states refer by a hash."""

    models: tuple[str, ...]
    adapters: tuple[str, ...]


Change = Snapshot | Put | Removed

PUT = EnvelopeKind("replica state", Put, pack=float)  # float() encodes numpy's numbers
REMOVED = EnvelopeKind("removed", Removed)
LISTS = EnvelopeKind("lists", Lists)

# KEYS: keys of the states, then of their lists. ARGV: number of states, TTL of states in ms, TTL of
# lists in ms, channel, states, lists (none: Redis should have them). Returns 1, and does nothing
# else, if Redis lacks a list. A Redis that refuses writes still publishes the states.
_PUT = f"""
local states, refused = tonumber(ARGV[1])
for i = states + 1, #KEYS do
  if ARGV[4 + i] then
    local set = redis.pcall('SET', KEYS[i], ARGV[4 + i], 'PX', ARGV[3])
    if set.err then refused = set end
  elseif redis.pcall('PEXPIRE', KEYS[i], ARGV[3]) ~= 1 then
    return 1
  end
end
for i = 1, states do
  local set = redis.pcall('SET', KEYS[i], ARGV[4 + i], 'PX', ARGV[2])
  if set.err then refused = set end
end
for first = 1, states, {_MAX_IN_MESSAGE} do
  local last = math.min(first + {_MAX_IN_MESSAGE} - 1, states)
  local head = '\\220' .. string.char(0, last - first + 1)  -- sealed_list
  redis.call('PUBLISH', ARGV[4], head .. table.concat(ARGV, '', 4 + first, 4 + last))
end
return refused
"""


class StateWriter:
    """Writes replica states, which live for ``ttl_s`` seconds, and pushes them to routers."""

    def __init__(self, redis: Redis, pool: str, ttl_s: float) -> None:
        self._redis = redis
        self._keys = Keys(pool)
        self._ttl_ms = max(1, round(ttl_s * 1000))

    async def put(self, states: Sequence[ReplicaState]) -> None:
        """Writes states in one round trip, or in two if Redis lacks a list of models."""
        if not states:
            return
        keys = [self._keys.replica + state.id for state in states]
        named = (_sealed_lists(state.models, state.adapters) for state in states if state.adapters)
        lists = {self._keys.lists + name: value for name, value in named}
        # Lists live twice as long as states, so that readers find the lists of each state.
        options = (len(keys), self._ttl_ms, 2 * self._ttl_ms, self._keys.changes)
        keys += lists
        put = partial(self._redis.eval, _PUT, len(keys), *keys, *options)
        if await in_time(put(*map(_sealed, states))):
            whole = [PUT.seal(Put(state)) for state in states]
            await in_time(put(*whole, *lists.values()))

    async def remove(self, replicas: Sequence[str]) -> None:
        keys = self._keys
        # In a transaction, a Redis that refuses to delete would also publish nothing.
        async with self._redis.pipeline(transaction=False) as pipe:
            for replica in replicas:
                pipe.delete(*(key + replica for key in (keys.replica, keys.blocks, keys.kv_stream)))
                pipe.publish(keys.changes, sealed_list(REMOVED.seal(Removed(replica))))
            await in_time(pipe.execute())


def _sealed(state: ReplicaState) -> bytes:
    """Returns the envelope of a state. If the state has adapters, a hash replaces its lists."""
    if not state.adapters:
        return PUT.seal(Put(state))
    name, _ = _sealed_lists(state.models, state.adapters)
    return PUT.seal(Put(structs.replace(state, models=(), adapters=()), name))


@lru_cache(_MOST_LISTS)
def _sealed_lists(models: tuple[str, ...], adapters: tuple[str, ...]) -> tuple[str, bytes]:
    """Returns the hash and the envelope of these lists."""
    value = LISTS.seal(Lists(models, adapters))
    return blake2b(value, digest_size=12).hexdigest(), value


class StateReader(ChannelReader[Change]):
    """Yields a snapshot of the replica states and then their changes; logs outages of Redis.

    After an outage, the reader yields a new snapshot. Redis does not push the expiry of a state;
    the next snapshot lacks the state. A state that was pushed while a snapshot was read may follow
    the snapshot, although the snapshot has a newer one.
    """

    def __init__(self, redis: Redis, pool: str, skips: Skips | None = None) -> None:
        super().__init__(redis, pool, Keys(pool).changes, skips)
        self.outage = outage(redis)
        self._lists: dict[str, Lists] = {}  # by hash

    async def read(self, replicas: Iterable[str] | None = None) -> Snapshot:
        """Returns the states that Redis has of these replicas; None: of all replicas."""
        if replicas is None:
            keys = await keys_after(self._redis, self._keys.replica)
        else:
            keys = [self._keys.replica + replica for replica in replicas]
        states: list[ReplicaState] = []
        ages: dict[str, float] = {}
        async for page in stored_values(self._redis, keys, self._skips, PUT):
            ages |= {put.state.id: max(put.state.life_s - left_s, 0.0) for put, left_s in page}
            puts = await self._completed([put for put, _ in page])
            states += [put.state for put in puts]
        return Snapshot(tuple(states), ages)

    async def _found(self) -> AsyncIterator[Change]:
        snapshot = await self.read()
        self.outage.recovered()
        yield snapshot

    async def _pushed(self, data: bytes) -> AsyncIterator[Change]:
        changes = self._skips.open_all(self._channel, data, PUT, REMOVED)
        for change in await self._completed(changes):
            yield change

    async def _completed(self, changes: Sequence[Any]) -> list[Any]:
        """Puts the lists into the states that have a hash instead. Drops a state whose list Redis
        lacks; the replica's next state carries the list itself."""
        if len(self._lists) > _MOST_LISTS:
            self._lists.clear()
        named = {change.lists for change in changes if isinstance(change, Put) and change.lists}
        if unknown := sorted(named - self._lists.keys()):
            keys = [self._keys.lists + name for name in unknown]
            values = await in_time(self._redis.mget(keys))
            for name, key, value in zip(unknown, keys, values, strict=True):
                if value is not None and (lists := self._skips.open(key, value, LISTS)):
                    self._lists[name] = lists
        completed = []
        for change in changes:
            if not (isinstance(change, Put) and change.lists):
                completed.append(change)
            elif lists := self._lists.get(change.lists):
                state = structs.replace(change.state, models=lists.models, adapters=lists.adapters)
                completed.append(Put(state))
        return completed

    def _failed(self, error: Exception) -> None:
        self.outage.failed(error)
