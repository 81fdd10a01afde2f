"""Announcements to other routers: sent prompts, and owners of responses and sessions."""

import asyncio
import struct
from collections import deque

import numpy as np

from extproc.request.prefix import NO_PREFIX, Prefix

MAX_PROMPT_BATCHES = 4096
"""Batches of prompts that Redis stores for routers that start later: 80 MB at 1,000 requests a
second with 8,000 tokens each, when a router's batch holds 20 prompts."""
MAX_OWNERS = 100_000  # owners that a router remembers, the newest: 20 MB
_MAX_PENDING = 10_000  # announcements that wait for Redis, the newest
_MAX_PENDING_BYTES = 10_000_000  # of pending prompts: a prompt of 8,000 tokens takes 1 kB
_MAX_BATCH = 100  # prompts: the reader's event loop is blocked for about 5 ms

_HEADER = struct.Struct("<HIffQ")
"""Header of a prompt: length of the replica's name in bytes, units, tokens in a unit, tokens, key
of the whole prompt."""


class PromptLog:
    """Prompts that this router sent and other routers have not received yet."""

    def __init__(self) -> None:
        self._pending: deque[bytes] = deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, replica: str, prefix: Prefix) -> None:
        if prefix.tokens:
            self._add(replica, prefix)

    def restarted(self, replica: str) -> None:
        """Announces that the replica's prefix cache is empty, as a prompt without tokens."""
        self._add(replica, NO_PREFIX)

    def take(self) -> bytes:
        """Removes the oldest prompts and returns them packed; empty bytes if there are none.

        A prompt takes 22 bytes, the replica's name, and 8 bytes for each of its units.
        """
        return b"".join([self._pop() for _ in range(min(len(self._pending), _MAX_BATCH))])

    def _add(self, replica: str, prefix: Prefix) -> None:
        name, keys = replica.encode(), prefix.keys
        header = _HEADER.pack(len(name), len(keys), prefix.unit, prefix.tokens, prefix.whole)
        packed = b"".join([header, name, keys.astype("<u8", copy=False).tobytes()])
        self._pending.append(packed)
        self._size += len(packed)
        while len(self._pending) > _MAX_PENDING or self._size > _MAX_PENDING_BYTES:
            self._pop()

    def _pop(self) -> bytes:
        oldest = self._pending.popleft()
        self._size -= len(oldest)
        return oldest


def read_prompts(data: bytes) -> list[tuple[str, Prefix]]:
    """Unpacks the replicas and prompts that :meth:`PromptLog.take` packed.

    Raises:
        ValueError: the data are cut short or have impossible figures.
    """
    found, at = [], 0
    try:
        while at < len(data):
            length, units, unit, tokens, whole = _HEADER.unpack_from(data, at)
            at += _HEADER.size + length
            replica = data[at - length : at].decode()
            keys = np.frombuffer(data, "<u8", units, at)
            at += keys.nbytes
            if not (0.0 < unit < np.inf and 0.0 <= tokens < np.inf):
                raise ValueError(f"impossible prompt: {tokens} tokens, {unit} tokens in a unit")
            found.append((replica, Prefix(keys, unit, tokens, whole)))
    except struct.error as error:
        raise ValueError(f"the prompts are cut short: {error}") from None
    return found


class OwnerMap:
    """Replicas that own stored responses, or sessions, by the key of the response or session."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._pending: deque[tuple[str, str]] = deque(maxlen=_MAX_PENDING)
        self._has_pending = asyncio.Event()

    def owner(self, key: str) -> str | None:
        return self._owners.get(key)

    def remember(self, key: str, replica: str) -> None:
        """Stores an owner that another router announced."""
        self._owners.pop(key, None)  # the newest stands last
        if len(self._owners) >= MAX_OWNERS:
            del self._owners[next(iter(self._owners))]
        self._owners[key] = replica

    def record(self, key: str, replica: str) -> None:
        """Stores an owner that this router observed, and announces a change; ignores empty keys."""
        if not key:
            return
        if self._owners.get(key) != replica:
            self._pending.append((key, replica))
            self._has_pending.set()
        self.remember(key, replica)

    async def take_announcements(self, most: int) -> list[tuple[str, str]]:
        """Waits for announcements; removes and returns the oldest keys and owners."""
        await self._has_pending.wait()
        taken = [self._pending.popleft() for _ in range(min(most, len(self._pending)))]
        if not self._pending:
            self._has_pending.clear()
        return taken
