"""Replica state in Redis: pollers write it, every router hears of each change.

A state is a value, not an event: the last one wins, and a lost one is repaired by the next.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random

from pydantic import BaseModel, ConfigDict, ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.utils import str_if_bytes

from extproc.backoff import Backoff
from extproc.replica_state import ReplicaState
from extproc.store.connection import Outage, in_time
from extproc.store.keys import (
    blocks_key,
    changes_channel,
    kv_stream_key,
    lease_key,
    replica_key,
    replica_pattern,
)
from extproc.store.read import Garbage, keys_like, pushed, what_is_wrong

RECONNECT_FIRST_S = 0.05
RECONNECT_MOST_S = 0.5
"""Half of the second within which a router is to be full again after Redis is back."""


_IN_A_MESSAGE = 16
"""States at most. To receive a message of one costs every router as much as to read and to apply
the state in it; a message of 16 keeps it from its requests for a millisecond."""
_IN_A_PAGE = 64
"""States at most that are read at once."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All states in Redis. It comes first, and again whenever pushes may have been missed."""

    states: tuple[ReplicaState, ...]
    ages: dict[str, float] = field(default_factory=dict, compare=False)
    """Seconds that Redis has had each, by its id and by Redis's clock."""


@dataclass(frozen=True, slots=True)
class Put:
    """A replica's new state."""

    state: ReplicaState


@dataclass(frozen=True, slots=True)
class Removed:
    """A replica left the pool."""

    id: str


Change = Snapshot | Put | Removed


class _Message(BaseModel):
    """What the channel carries: states, or the id of a replica that left; nothing for a kind of
    message this version does not know."""

    model_config = ConfigDict(extra="ignore")

    put: tuple[ReplicaState, ...] = ()
    removed: str | None = None

    def changes(self) -> Iterator[Change]:
        """Each change it tells of."""
        yield from map(Put, self.put)
        if self.removed is not None:
            yield Removed(self.removed)


# KEYS: of each state its lease and its own. ARGV: the poller that must hold the lease (empty:
# nobody must), TTL in ms, channel, values. Whoever lost a lease has seen less than its new holder.
# A full Redis refuses values, and still passes them on.
_PUT = f"""
local refused
local held = {{}}
for i = 1, #KEYS / 2 do
  if ARGV[1] == '' or redis.call('GET', KEYS[2 * i - 1]) == ARGV[1] then
    local value = ARGV[3 + i]
    local set = redis.pcall('SET', KEYS[2 * i], value, 'PX', ARGV[2])
    if set.err then refused = set end
    held[#held + 1] = value
  end
end
for first = 1, #held, {_IN_A_MESSAGE} do
  local last = math.min(first + {_IN_A_MESSAGE} - 1, #held)
  redis.call('PUBLISH', ARGV[3], '{{"put":[' .. table.concat(held, ',', first, last) .. ']}}')
end
return refused
"""

# KEYS: of each replica its lease, its state, its blocks and what is known of its KV events. ARGV:
# the poller that removes it (empty: whoever has the lease), channel, messages. Whoever has the
# lease meanwhile scrapes it.
_REMOVE = """
for i = 1, #KEYS / 4 do
  local holder = redis.call('GET', KEYS[4 * i - 3])
  if ARGV[1] == '' or not holder or holder == ARGV[1] then
    redis.call('DEL', KEYS[4 * i - 2], KEYS[4 * i - 1], KEYS[4 * i])
    redis.call('PUBLISH', ARGV[2], ARGV[2 + i])
  end
end
"""

# KEYS: states. What is none is neither here nor there: nil, as with MGET.
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
    """Writes replica states and tells the pool's routers.

    Args:
        redis: where to.
        pool: the replicas' pool.
        ttl_s: life of a state, in seconds.
        poller: only what this poller holds the lease on is written; empty: everything.
    """

    def __init__(self, redis: Redis, pool: str, ttl_s: float, poller: str = "") -> None:
        self._redis = redis
        self._pool = pool
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._poller = poller

    async def put(self, states: Sequence[ReplicaState]) -> None:
        """Write and announce the states in one round trip; each lives for the TTL.

        Raises:
            RedisError: Redis did not take them; some may be written.
        """
        if not states:
            return
        keys = self._keys([state.id for state in states], lease_key, replica_key)
        values = [state.model_dump_json() for state in states]
        options = (self._poller, self._ttl_ms, changes_channel(self._pool))
        async with in_time():
            await self._redis.eval(_PUT, len(keys), *keys, *options, *values)

    async def remove(self, replicas: Sequence[str]) -> None:
        """Delete what is known of them and announce it in one round trip; not of what another
        poller has.

        Raises:
            RedisError: Redis did not take it.
        """
        if not replicas:
            return
        keys = self._keys(replicas, lease_key, replica_key, blocks_key, kv_stream_key)
        messages = [_Message(removed=one).model_dump_json(exclude_none=True) for one in replicas]
        options = (self._poller, changes_channel(self._pool))
        async with in_time():
            await self._redis.eval(_REMOVE, len(keys), *keys, *options, *messages)

    def _keys(self, replicas: Sequence[str], *kinds: Callable[[str, str], str]) -> list[str]:
        return [key(self._pool, replica) for replica in replicas for key in kinds]


class StateReader:
    """Reads replica states as they change."""

    def __init__(self, redis: Redis, pool: str, random: Random) -> None:
        self._redis = redis
        self._pool = pool
        self._outage = Outage(redis)
        self._backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MOST_S, random)
        self._garbage = Garbage()

    @property
    def lost(self) -> bool:
        """Whether Redis is away, so that changes are not heard of."""
        return self._outage.lost

    async def changes(self) -> AsyncGenerator[Change]:
        """Yield a snapshot, then every change as it is pushed, for ever.

        While Redis is away it yields nothing; then it begins with a snapshot again. A state whose
        life has ended is not pushed: it is missing from the next snapshot.
        """
        while True:
            try:
                async with aclosing(self._connected()) as changes:
                    async for change in changes:
                        yield change
            except (RedisError, OSError) as error:
                self._outage.failed(error)
                await asyncio.sleep(self._backoff.next())

    async def _connected(self) -> AsyncGenerator[Change]:
        async with aclosing(pushed(self._redis, changes_channel(self._pool))) as pushes:
            async for data in pushes:
                if data is None:
                    snapshot = await self._read(list(await self._keys()))
                    self._backoff.reset()
                    self._outage.succeeded()
                    yield snapshot
                else:
                    for change in self._changes(data):
                        yield change

    async def states(self) -> tuple[ReplicaState, ...]:
        """All states in Redis now.

        Raises:
            RedisError: Redis did not tell.
        """
        return (await self._read(list(await self._keys()))).states

    async def states_of(self, replicas: Iterable[str]) -> tuple[ReplicaState, ...]:
        """The states of these replicas, as far as they are in Redis now.

        Raises:
            RedisError: Redis did not tell.
        """
        keys = [replica_key(self._pool, replica) for replica in replicas]
        return (await self._read(keys)).states

    async def _read(self, keys: Sequence[bytes | str]) -> Snapshot:
        """Page by page: to read a thousand states at once keeps a router from its requests."""
        states: list[ReplicaState] = []
        ages: dict[str, float] = {}
        for first in range(0, len(keys), _IN_A_PAGE):
            page = keys[first : first + _IN_A_PAGE]
            async with in_time():
                values, left = await self._redis.eval(_READ, len(page), *page)
            for key, value, left_ms in zip(page, values, left, strict=True):
                if value is not None and (state := self._state(key, value)) is not None:
                    states.append(state)
                    ages[state.id] = max(state.life_s - left_ms / 1000, 0.0)
        return Snapshot(tuple(states), ages)

    async def state(self, replica_id: str) -> ReplicaState | None:
        """One replica's state in Redis now; None where there is none.

        Raises:
            RedisError: Redis did not tell.
        """
        key = replica_key(self._pool, replica_id)
        async with in_time():
            value = await self._redis.get(key)
        return None if value is None else self._state(key, value)

    async def _keys(self) -> set[bytes | str]:
        return await keys_like(self._redis, replica_pattern(self._pool))

    def _state(self, key: bytes | str, value: bytes | str) -> ReplicaState | None:
        try:
            return ReplicaState.model_validate_json(value)
        except ValidationError as error:
            self._garbage.skipped(str_if_bytes(key), what_is_wrong(error))
            return None

    def _changes(self, data: bytes | str) -> Iterator[Change]:
        try:
            return _Message.model_validate_json(data).changes()
        except ValidationError as error:
            self._garbage.skipped(changes_channel(self._pool), what_is_wrong(error))
            return iter(())
