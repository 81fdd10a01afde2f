"""Lists of models and LoRA adapters, to which replica states refer by a hash.

With 500 names in every state, each router would receive 8 MB/s. Redis stores each list once, for
longer than the states that refer to the list. If Redis lacks a list, states carry the list.
"""

from collections.abc import Collection, Container
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from msgspec import Struct, structs
from redis.asyncio import Redis

from extproc.replica_state import ReplicaState
from extproc.share.connection import Keys, in_time
from extproc.share.envelope import EnvelopeKind, Skips


class Put(Struct, array_like=True, frozen=True):
    """New state of a replica."""

    state: ReplicaState
    lists: str = ""  # hash of models and adapters, which the state lacks; empty: the state has them


class Lists(Struct, array_like=True, frozen=True):
    """Models and adapters of a replica, to which its states refer by a hash."""

    models: tuple[str, ...]
    adapters: tuple[str, ...]


PUT = EnvelopeKind("replica state", Put, pack=float)  # float() encodes numpy's numbers
LISTS = EnvelopeKind("lists", Lists)


@lru_cache(maxsize=256)
def sealed_lists(models: tuple[str, ...], adapters: tuple[str, ...]) -> tuple[str, bytes]:
    """Returns the hash and the envelope of these lists."""
    value = LISTS.seal(Lists(models, adapters))
    return blake2b(value, digest_size=12).hexdigest(), value


def sealed(state: ReplicaState) -> bytes:
    """Returns the envelope of a state. If the state has adapters, a hash replaces its lists."""
    if not state.adapters:
        return PUT.seal(Put(state))
    name, _ = sealed_lists(state.models, state.adapters)
    return PUT.seal(Put(structs.replace(state, models=(), adapters=()), name))


class KnownLists:
    """Cache of the lists to which each replica's last state referred; Redis is asked for others."""

    def __init__(self, redis: Redis, pool: str, skips: Skips) -> None:
        self._redis = redis
        self._key = Keys(pool).lists
        self._skips = skips
        self._last: dict[str, tuple[str, Lists]] = {}  # replica → hash and lists

    def forget(self, replica: str) -> None:
        self._last.pop(replica, None)

    def keep(self, replicas: Container[str]) -> None:
        """Forgets the lists of all replicas except ``replicas``."""
        self._last = {id_: last for id_, last in self._last.items() if id_ in replicas}

    async def complete(self, changes: Collection[Any]) -> list[Any]:
        """Puts the lists into the states that have a hash instead. Drops a state whose list Redis
        lacks; the replica's next state carries the list itself."""
        listed = [change for change in changes if isinstance(change, Put) and change.lists]
        known: dict[str, Lists | None] = dict(
            self._last[change.state.id] for change in listed if change.state.id in self._last
        )
        if unknown := sorted({change.lists for change in listed} - known.keys()):
            known |= await self._read(unknown)
        completed = []
        for change in changes:
            if not (isinstance(change, Put) and change.lists):
                completed.append(change)
            elif lists := known.get(change.lists):
                self._last[change.state.id] = change.lists, lists
                state = structs.replace(change.state, models=lists.models, adapters=lists.adapters)
                completed.append(Put(state))
        return completed

    async def _read(self, names: list[str]) -> dict[str, Lists | None]:
        """Returns the named lists in Redis, with None for unreadable lists."""
        keys = [self._key + name for name in names]
        values = await in_time(self._redis.mget(keys))
        return {
            name: self._skips.open(key, value, LISTS)
            for name, key, value in zip(names, keys, values, strict=True)
            if value is not None
        }
