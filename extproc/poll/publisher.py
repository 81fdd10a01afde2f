"""Brings what the watches see into Redis without making them wait for it."""

import asyncio

from redis.exceptions import RedisError

from extproc.backoff import Backoff
from extproc.replica_state import ReplicaState
from extproc.store.connection import Outage
from extproc.store.replicas import StateWriter

_GATHER_S = 0.02
"""Seconds to wait for more to write: a round trip costs as much as ten states."""


class Publisher:
    """Writes each replica's newest state as soon as Redis takes it.

    A Redis that was away may have come back empty, so then everything is written again. What is
    written while its lease is lost, Redis leaves out.
    """

    def __init__(self, writer: StateWriter, outage: Outage, backoff: Backoff) -> None:
        self._writer = writer
        self._outage = outage
        self._backoff = backoff
        self._current: dict[str, ReplicaState] = {}
        self._changed: set[str] = set()
        """Whose current state is not written yet."""
        self._leaving: set[str] = set()
        """Whose state is not deleted yet."""
        self._some = asyncio.Event()

    def put(self, state: ReplicaState) -> None:
        """Have the state written."""
        self._current[state.id] = state
        self._changed.add(state.id)
        self._leaving.discard(state.id)
        self._some.set()

    def republish(self, replica_id: str) -> None:
        """Have the newest state written once more, if there is one."""
        if replica_id in self._current:
            self.put(self._current[replica_id])

    def forget(self, replica_id: str) -> None:
        """Another poller has the replica now, or is to: it is not deleted either."""
        self._current.pop(replica_id, None)
        self._changed.discard(replica_id)
        self._leaving.discard(replica_id)

    def remove(self, replica_id: str) -> None:
        """Have the replica's state deleted."""
        self.forget(replica_id)
        self._leaving.add(replica_id)
        self._some.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._some.wait()
            await asyncio.sleep(_GATHER_S)
            self._some.clear()
            leaving = frozenset(self._leaving)
            try:
                await self._writer.remove([*leaving])  # first: a full Redis takes nothing new
                self._leaving -= leaving
                changed, self._changed = self._changed, set()
                await self._writer.put([self._current[replica] for replica in changed])
            except (RedisError, OSError) as error:
                self._changed.update(self._current)
                self._some.set()
                self._outage.failed(error)
                await asyncio.sleep(self._backoff.next())
            else:
                self._backoff.reset()
                self._outage.succeeded()
