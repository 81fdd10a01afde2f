"""Brings what is seen of replicas into Redis without making anybody wait for it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from redis.exceptions import RedisError

from extproc.backoff import Backoff
from extproc.poll.kv_blocks import KvBlocks
from extproc.replica_state import ReplicaState
from extproc.store.blocks import BlockWriter
from extproc.store.connection import Outage
from extproc.store.replicas import StateWriter

_GATHER_S = 0.02
"""Seconds to wait for more to write: a round trip costs as much as ten states, or thousands of KV
blocks."""


class _Publisher:
    """Writes soon after there is something to write, and again where Redis did not take it."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._some = asyncio.Event()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._some.wait()
            await asyncio.sleep(_GATHER_S)
            self._some.clear()
            if await self._write():
                self._backoff.reset()
            else:
                await asyncio.sleep(self._backoff.next())

    async def _write(self) -> bool:
        """Whether Redis took it."""
        raise NotImplementedError


class Publisher(_Publisher):
    """Writes each replica's newest state as soon as Redis takes it.

    A Redis that was away may have come back empty, so then everything is written again. What is
    written while its lease is lost, Redis leaves out.
    """

    def __init__(self, writer: StateWriter, outage: Outage, backoff: Backoff) -> None:
        super().__init__(backoff)
        self._writer = writer
        self._outage = outage
        self._current: dict[str, ReplicaState] = {}
        self._changed: set[str] = set()
        """Whose current state is not written yet."""
        self._leaving: set[str] = set()
        """Whose state is not deleted yet."""

    def put(self, state: ReplicaState) -> None:
        """Have the state written."""
        self._current[state.id] = state
        self._changed.add(state.id)
        self._leaving.discard(state.id)
        self._some.set()

    def forget(self, replica: str) -> None:
        """Another poller has the replica now, or is to: it is not deleted either."""
        self._current.pop(replica, None)
        self._changed.discard(replica)
        self._leaving.discard(replica)

    def remove(self, replica: str) -> None:
        """Have the replica's state deleted."""
        self.forget(replica)
        self._leaving.add(replica)
        self._some.set()

    async def _write(self) -> bool:
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
            return False
        self._outage.succeeded()
        return True


class BlockPublisher(_Publisher):
    """Tells of each replica's KV blocks as soon as Redis takes it; that it is away, the publisher
    of states logs."""

    def __init__(self, writer: BlockWriter, backoff: Backoff) -> None:
        super().__init__(backoff)
        self._writer = writer
        self._changed: dict[str, KvBlocks] = {}

    def changed(self, replica: str, blocks: KvBlocks) -> None:
        """Have the news of that replica told."""
        self._changed[replica] = blocks
        self._some.set()

    async def load(self, replica: str) -> bytes:
        """What the poller before saved of that replica."""
        try:
            return await self._writer.load(replica)
        except (RedisError, OSError):
            return b""

    async def save(self, replica: str, dump: Callable[[], bytes]) -> None:
        """Keep that for the next poller."""
        with suppress(RedisError, OSError):
            await self._writer.save(replica, dump())

    async def _write(self) -> bool:
        changed, self._changed = self._changed, {}
        told = {replica: blocks.news() for replica, blocks in changed.items()}
        news = {replica: new for replica, new in told.items() if new}
        try:
            for replica in await self._writer.tell(news):
                changed[replica].not_kept()
        except (RedisError, OSError):
            for replica in news:
                changed[replica].repeat()
            return False
        return True
