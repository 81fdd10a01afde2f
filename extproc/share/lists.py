"""Lists of models and LoRA adapters, which states name by their hash.

500 names in every state were 8 MB/s to each router. Redis keeps each list once, and longer than the
states that name it. A state carries its lists where Redis does not have them.
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
    """A replica's new state."""

    state: ReplicaState


class PutListed(Struct, array_like=True, frozen=True):
    """A replica's new state, without its models and adapters."""

    state: ReplicaState
    lists: str  # their hash


class Lists(Struct, array_like=True, frozen=True):
    """Lists that states name by a hash."""

    models: tuple[str, ...]
    adapters: tuple[str, ...]


PUT = EnvelopeKind("put", Put, pack=float)  # of numpy's numbers
PUT_LISTED = EnvelopeKind("put listed", PutListed, pack=float)
LISTS = EnvelopeKind("lists", Lists)


def lists_of(state: ReplicaState) -> Lists:
    """Returns what other states may have, too."""
    return Lists(state.models, state.adapters)


@lru_cache(maxsize=256)
def sealed_lists(lists: Lists) -> tuple[str, bytes]:
    """Returns the hash of lists, and what Redis keeps of them."""
    value = LISTS.seal(lists)
    return blake2b(value, digest_size=12).hexdigest(), value


def sealed(state: ReplicaState) -> bytes:
    """Returns a state that names its lists, if it has adapters."""
    if not state.adapters:
        return PUT.seal(Put(state))
    name, _ = sealed_lists(lists_of(state))
    return PUT_LISTED.seal(PutListed(structs.replace(state, models=(), adapters=()), name))


class KnownLists:
    """The lists that replicas' last states name; Redis is asked for others."""

    def __init__(self, redis: Redis, pool: str, skips: Skips) -> None:
        self._redis = redis
        self._key = Keys(pool).lists
        self._skips = skips
        self._lists: dict[str, Lists] = {}  # by hash
        self._named: dict[str, str] = {}  # replica → hash

    def forget(self, replica: str) -> None:
        self._named.pop(replica, None)

    def keep(self, replicas: Container[str]) -> None:
        """Forgets all other replicas."""
        self._named = {one: name for one, name in self._named.items() if one in replicas}

    async def complete(self, changes: Collection[Any]) -> list[Any]:
        """Gives states their lists; drops those whose list Redis lacks, for the next carries it."""
        new: dict[str, Lists] = {}
        for one in changes:
            if isinstance(one, PutListed):
                self._named[one.state.id] = one.lists
            elif isinstance(one, Put):
                self._named.pop(one.state.id, None)
                if one.state.adapters:
                    lists = lists_of(one.state)
                    name, _ = sealed_lists(lists)
                    self._named[one.state.id] = name
                    new[name] = lists
        asked = {one.lists for one in changes if isinstance(one, PutListed)}
        if unknown := sorted(asked - self._lists.keys() - new.keys()):
            new |= await self._read(unknown)
        if new:
            named, known = {*self._named.values()}, self._lists | new
            self._lists = {name: lists for name, lists in known.items() if name in named}
        completed = map(self._completed, changes)
        return [one for one in completed if one is not None]

    async def _read(self, names: list[str]) -> dict[str, Lists]:
        keys = [self._key + name for name in names]
        async with in_time():
            values = await self._redis.mget(keys)
        found = {
            name: self._skips.open(key, value, LISTS)
            for name, key, value in zip(names, keys, values, strict=True)
            if value is not None
        }
        return {name: lists for name, lists in found.items() if lists is not None}

    def _completed(self, change: Any) -> Any:
        if not isinstance(change, PutListed):
            return change
        lists = self._lists.get(change.lists)
        if lists is None:
            return None
        return Put(structs.replace(change.state, models=lists.models, adapters=lists.adapters))
