"""Announcements of routers about single requests: prompts sent to a replica, and the
replicas that own stored responses and sessions."""

import asyncio
import struct
from collections import deque

import numpy as np

from extproc.request.prefix import NO_PREFIX, Prefix

MAX_PROMPT_BATCHES = 4096
"""Batches of prompts that Redis keeps for routers that start: 80 MB of them at 1,000 requests a
second with 8,000 tokens each, where a batch of one router holds 20."""
_MOST_UNTOLD, _MOST_BYTES = 10_000, 10_000_000
"""Prompts that wait for Redis, the newest: 1 kB each, where they have 8,000 tokens. A router that
needs no Redis keeps them for nobody."""
_AT_ONCE = 100  # prompts in a batch, at most: who hears of it does nothing else for some 5 ms

_HEADER = struct.Struct("<HIffQ")
"""Of a prompt: bytes of the replica's name, units, tokens in a unit, tokens, key of the whole."""


class PromptLog:
    """What this router sent, until the others are told."""

    def __init__(self) -> None:
        self._untold: deque[bytes] = deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._untold)

    def add(self, replica: str, prefix: Prefix) -> None:
        if prefix.tokens:
            self._add(replica, prefix)

    def restarted(self, replica: str) -> None:
        """That replica started anew: what was sent before is not there."""
        self._add(replica, NO_PREFIX)

    def take(self) -> bytes:
        """What others were not told yet, the oldest of it: 22 bytes and the replica's name for each
        prompt, and 8 for each of its units. Empty: nothing."""
        return b"".join([self._oldest() for _ in range(min(len(self._untold), _AT_ONCE))])

    def _add(self, replica: str, prefix: Prefix) -> None:
        name, keys = replica.encode(), prefix.keys
        sizes = len(name), len(keys), prefix.unit, prefix.tokens
        header = _HEADER.pack(*sizes, prefix.whole)
        told = b"".join([header, name, keys.astype("<u8", copy=False).tobytes()])
        self._untold.append(told)
        self._size += len(told)
        while len(self._untold) > _MOST_UNTOLD or self._size > _MOST_BYTES:
            self._oldest()

    def _oldest(self) -> bytes:
        oldest = self._untold.popleft()
        self._size -= len(oldest)
        return oldest


def read_prompts(data: bytes) -> list[tuple[str, Prefix]]:
    """What :meth:`PromptLog.take` made: replicas, and what of each prompt is told; of a replica
    that started anew, a prompt of no tokens.

    Raises:
        ValueError: it is none.
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
                raise ValueError("a unit without tokens")
            found.append((replica, Prefix(keys, unit, tokens, whole)))
    except struct.error as error:
        raise ValueError(f"prompts that are cut short: {error}") from None
    return found


MAX_OWNERS = 100_000  # things remembered, the newest: 20 MB
_MOST_UNTOLD = 10_000


class OwnerMap:
    """OwnerMap of things of one kind, as far as this router saw it or was told by others."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}
        self._untold: deque[tuple[str, str]] = deque(maxlen=_MOST_UNTOLD)
        self._some_untold = asyncio.Event()

    def owner(self, thing: str) -> str | None:
        return self._holders.get(thing)

    def remember(self, thing: str, replica: str) -> None:
        self._holders.pop(thing, None)  # the newest stands last
        if len(self._holders) >= MAX_OWNERS:
            del self._holders[next(iter(self._holders))]
        self._holders[thing] = replica

    def record(self, thing: str, replica: str) -> None:
        """Records that the replica got the thing, and announces it if other routers may not know;
        an empty id is none."""
        if not thing:
            return
        if self._holders.get(thing) != replica:
            self._untold.append((thing, replica))
            self._some_untold.set()
        self.remember(thing, replica)

    async def take_announcements(self, most: int) -> list[tuple[str, str]]:
        """Wait for what others were not told, things and replicas, and take the oldest of it."""
        await self._some_untold.wait()
        taken = [self._untold.popleft() for _ in range(min(most, len(self._untold)))]
        if not self._untold:
            self._some_untold.clear()
        return taken
