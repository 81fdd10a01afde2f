"""Announcements to other routers: sent prompts, and owners of responses and sessions."""

import asyncio
from collections import OrderedDict, deque
from typing import Annotated

from msgspec import Meta, Struct

from extproc.request.prefix import Keys, Prefix

MAX_PROMPT_BATCHES = 4096
"""Batches of prompts that Redis stores for routers that start later: at most 100 MB of prompts with
8,000 tokens each, and 200 MB of prompts with a million bytes each."""
MAX_OWNERS = 100_000  # limit of the owners that a router remembers: 24 MB
_MAX_PENDING = 10_000  # limit of the announcements that wait for Redis; the oldest are dropped
_MAX_PENDING_BYTES = 10_000_000  # of pending prompts: a prompt of 8,000 tokens takes 1 kB
_MAX_BATCH, _MAX_BATCH_BYTES = 100, 20_000
"""Limits of a batch: prompts, and bytes of the keys of all its prompts but the last. 20,000 bytes,
as of 20 prompts with 8,000 tokens each, block the reader's event loop for a millisecond."""


class SentPrompt(Struct, array_like=True, eq=False):
    """Prompt that a router sent to a replica. A prompt of 0 tokens announces that the replica's
    prefix cache is empty."""

    replica: str  # ``ip:port``
    keys: Keys  # this field and those below: as in :class:`~extproc.request.prefix.Prefix`
    unit: Annotated[float, Meta(ge=1e-6, le=1e9)]
    tokens: Annotated[float, Meta(ge=0.0, le=1e9)]
    whole: int

    @property
    def prefix(self) -> Prefix:
        return Prefix(self.keys, self.unit, self.tokens, self.whole)


class PromptLog:
    """Prompts that this router sent to replicas and has not announced to other routers yet."""

    def __init__(self) -> None:
        self._pending: deque[SentPrompt] = deque()
        self._size = 0  # bytes of the pending keys

    def add(self, replica: str, prefix: Prefix) -> None:
        self._pending.append(
            SentPrompt(replica, prefix.keys, prefix.unit, prefix.tokens, prefix.whole)
        )
        self._size += prefix.keys.nbytes
        while len(self._pending) > _MAX_PENDING or self._size > _MAX_PENDING_BYTES:
            self._pop()

    def take(self) -> tuple[SentPrompt, ...]:
        """Removes and returns a batch of the oldest prompts."""
        batch, after = list[SentPrompt](), self._size - _MAX_BATCH_BYTES
        while self._pending and len(batch) < _MAX_BATCH and self._size > after:
            batch.append(self._pop())
        return tuple(batch)

    def _pop(self) -> SentPrompt:
        oldest = self._pending.popleft()
        self._size -= oldest.keys.nbytes
        return oldest


class OwnerMap:
    """Replicas that own stored responses, or sessions, by the key of the response or session."""

    def __init__(self) -> None:
        self._owners = OrderedDict[str, str]()  # a dict takes 0.1 ms to find its oldest key
        self._pending: deque[tuple[str, str]] = deque(maxlen=_MAX_PENDING)
        self._has_pending = asyncio.Event()

    def owner(self, key: str) -> str | None:
        return self._owners.get(key)

    def remember(self, key: str, replica: str) -> None:
        """Stores an owner that another router announced."""
        self._owners[key] = replica
        self._owners.move_to_end(key)
        if len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)

    def record(self, key: str, replica: str) -> None:
        """Stores an owner that this router observed; announces it if new. Ignores empty keys."""
        if not key:
            return
        if self._owners.get(key) != replica:
            self._pending.append((key, replica))
            self._has_pending.set()
        self.remember(key, replica)

    async def take_announcements(self, most: int) -> list[tuple[str, str]]:
        """Waits for announcements; returns and removes the oldest ``most``, as (key, owner)."""
        await self._has_pending.wait()
        taken = [self._pending.popleft() for _ in range(min(most, len(self._pending)))]
        if not self._pending:
            self._has_pending.clear()
        return taken
