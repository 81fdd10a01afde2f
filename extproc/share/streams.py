"""Streams in Redis that every router appends to and reads."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from redis.utils import str_if_bytes

from extproc.fleet.announcements import SentPrompt
from extproc.fleet.held_blocks import pack, unpack
from extproc.share.connection import TIMEOUT_S, in_time, reconnecting
from extproc.share.envelope import B, EnvelopeKind, Skips
from extproc.share.reader import Reader

_PAGE = 100  # entries in a read, which block the event loop for some 5 ms
_BLOCK_MS = round(TIMEOUT_S * 500)  # longest time for which Redis waits for an entry
_LIFE_S = 86_400  # life of a stream, from the last entry on
_NONE = "0-0"  # precedes the id of every entry
_FIELD = ""  # an entry's only field


class Owner(Struct, array_like=True, frozen=True):
    """Replica that owns a stored response, or a session."""

    thing: str  # id of the response, or hash of the session
    replica: str  # ip:port


class Prompts(Struct, array_like=True, frozen=True):
    """Prompts that a router sent to replicas."""

    router: str
    prompts: tuple[SentPrompt, ...]


OWNER = EnvelopeKind("owner", Owner)
PROMPTS = EnvelopeKind("sent_prompts", Prompts, pack, unpack)


async def append(
    redis: Redis, key: str, kind: EnvelopeKind[B], most: int, bodies: Iterable[B]
) -> None:
    """Appends entries to a stream in one round trip; while Redis is away, tries again and again.
    Redis stores about the last ``most`` entries."""
    entries: list[Any] = [{_FIELD: kind.seal(body)} for body in bodies]
    backoff = reconnecting()
    while True:
        try:
            async with redis.pipeline(transaction=False) as pipe:
                for entry in entries:
                    pipe.xadd(key, entry, maxlen=most, approximate=True)
                pipe.expire(key, _LIFE_S)
                await in_time(pipe.execute())
            return
        except (RedisError, OSError):
            await asyncio.sleep(backoff.next())


class StreamReader(Reader[B]):
    """Yields the entries of one kind in a stream.

    After an outage, the reader resumes behind the last entry read. If the stream now ends before
    that entry, Redis lost the stream, and the reader starts from the beginning of the new stream.
    """

    def __init__(
        self, redis: Redis, key: str, kind: EnvelopeKind[B], skips: Skips | None = None
    ) -> None:
        super().__init__(redis, skips)
        self.key = key
        self._kind = kind
        self._after = _NONE

    async def _connected(self) -> AsyncGenerator[B]:
        newest: Any = await in_time(self._redis.xrevrange(self.key, count=1))
        last = str_if_bytes(newest[0][0]) if newest else _NONE
        if _order(last) < _order(self._after):
            self._after = _NONE
        while True:
            entries = await self._entries()
            self._backoff.reset()
            for number, fields in entries:
                self._after = str_if_bytes(number)
                if body := self._skips.open(self.key, fields.get(_FIELD.encode()), self._kind):
                    yield body
            await asyncio.sleep(0)  # lets requests run between pages

    def _failed(self, error: Exception) -> None:
        if isinstance(error, ResponseError):  # the key holds no stream
            self._skips.garbage(self.key, error)

    async def _entries(self) -> list[tuple[bytes | str, dict[bytes, bytes]]]:
        """Returns the next entries; waits up to half a second for the first entry."""
        key: Any = {self.key: self._after}
        found: Any = await in_time(self._redis.xread(key, count=_PAGE, block=_BLOCK_MS))
        if isinstance(found, dict):  # RESP3: {key: [[entry, …]]}
            return [entry for entries in found.values() for entry in entries[0]]
        return [entry for _, entries in found for entry in entries]


def _order(number: str) -> list[int]:
    """Returns the parts of an entry's id that order entries: milliseconds, and a count in each."""
    return [int(part) for part in number.split("-")]
