"""Brings news of KV blocks into Redis without making their streams wait for it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from redis.exceptions import RedisError

from extproc.backoff import Backoff
from extproc.poll.kv_blocks import KvBlocks
from extproc.store.blocks import BlockWriter

_GATHER_S = 0.02
"""Seconds to wait for more to tell: a round trip costs as much as thousands of keys."""


class KvPublisher:
    """Tells of each replica's blocks as soon as Redis takes it.

    Of Redis being away the publisher of states logs.
    """

    def __init__(self, writer: BlockWriter, backoff: Backoff) -> None:
        self._writer = writer
        self._backoff = backoff
        self._changed: dict[str, KvBlocks] = {}
        self._some = asyncio.Event()

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

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await self._some.wait()
            await asyncio.sleep(_GATHER_S)
            self._some.clear()
            changed, self._changed = self._changed, {}
            told = {replica: blocks.news() for replica, blocks in changed.items()}
            news = {replica: new for replica, new in told.items() if new}
            try:
                for replica in await self._writer.tell(news):
                    changed[replica].not_kept()
                self._backoff.reset()
            except (RedisError, OSError):
                for replica in news:
                    changed[replica].repeat()
                await asyncio.sleep(self._backoff.next())
