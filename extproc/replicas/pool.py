"""A pool as Redis holds it: what pollers saw, and what commands asked for."""

from dataclasses import dataclass
from random import Random

from redis.asyncio import Redis

from extproc.ground.address import with_name
from extproc.ground.text import suggest
from extproc.replica_state import ReplicaState
from extproc.share.desired import Desired, DesiredStore
from extproc.share.replicas import StateReader


class ReplicaError(Exception):
    """A command cannot be carried out; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Replica:
    """What is known of one replica."""

    id: str
    """``ip:port``."""
    state: ReplicaState | None
    """What a poller saw; None: no poller has yet, or it left."""
    desired: Desired | None
    """What was asked for by command."""

    @property
    def name(self) -> str:
        """What people call it."""
        if self.state is not None:
            return self.state.name or self.id
        source = self.desired.source if self.desired else None
        return (source.name if source else "") or self.id

    @property
    def title(self) -> str:
        """Name and address."""
        return with_name(self.id, self.name)

    @property
    def wish(self) -> str:
        """``serve``, ``drain`` or ``remove``."""
        return self.desired.wish if self.desired else "serve"


class Pool:
    """Reads one pool."""

    def __init__(self, redis: Redis, name: str) -> None:
        self.name = name
        self.desired = DesiredStore(redis, name)
        self.states = StateReader(redis, name, Random())

    async def replicas(self) -> list[Replica]:
        """All that pollers or commands named, by name."""
        desired = await self.desired.read()
        states = {state.id: state for state in (await self.states.read()).states}
        known = [Replica(id_, states.get(id_), desired.get(id_)) for id_ in desired | states]
        return sorted(known, key=lambda replica: (replica.name, replica.id))

    async def find(self, word: str) -> Replica:
        """The replica at an address, or of a name."""
        replicas = [one for one in await self.replicas() if one.state or one.wish != "remove"]
        found = [one for one in replicas if word in (one.id, one.name)]
        if len(found) > 1:
            ids = ", ".join(one.id for one in found)
            raise ReplicaError(f"{len(found)} replicas are called {word!r}: say which of {ids}")
        if not found:
            known = [part for one in replicas for part in (one.id, one.name)]
            hint = suggest(word, known) if known else ": no replica is; does a poller run?"
            raise ReplicaError(f"{word!r} is not in the pool {self.name!r}{hint}")
        return found[0]
