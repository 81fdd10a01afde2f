"""Readers of Redis, which yield the stored values first, and then each change."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError
from redis.utils import str_if_bytes

from extproc.share.connection import TIMEOUT_S, Keys, in_time, reconnecting
from extproc.share.envelope import B, EnvelopeKind, Skips

_SCAN_PAGE = 1000
_VALUES_PAGE = 64  # values that are read at once
_NO_CHANNEL = "none"  # nobody subscribes to this channel

T = TypeVar("T")


async def keys_after(redis: Redis, beginning: str) -> list[str]:
    """Returns the keys with this beginning, page by page, so that other clients wait briefly."""
    keys: set[str] = set()
    cursor = 0
    while True:
        cursor, page = await in_time(redis.scan(cursor, match=f"{beginning}*", count=_SCAN_PAGE))
        keys.update(map(str_if_bytes, page))
        if cursor == 0:
            return sorted(keys)


async def stored_values(
    redis: Redis, keys: Sequence[str], skips: Skips, kind: EnvelopeKind[B]
) -> AsyncIterator[list[tuple[B, float]]]:
    """Yields pages of (body, seconds until the key expires) for the keys whose value can be read.
    Lets other tasks run after each page."""
    for first in range(0, len(keys), _VALUES_PAGE):
        page = keys[first : first + _VALUES_PAGE]
        async with redis.pipeline(transaction=False) as pipe:
            for key in page:
                pipe.get(key)
                pipe.pttl(key)
            found = await in_time(pipe.execute(raise_on_error=False))
        opened = [
            (skips.open(key, value, kind), max(left_ms, 0) / 1000)
            for key, value, left_ms in zip(page, found[::2], found[1::2], strict=True)
            if isinstance(value, bytes) and isinstance(left_ms, int)
        ]
        yield [(body, left_s) for body, left_s in opened if body is not None]


class Reader(ABC, Generic[T]):
    """Yields stored values and then changes; starts again after a lost connection.

    Of the readers, only that of replica states logs outages: they share a Redis.
    """

    def __init__(self, redis: Redis, skips: Skips | None = None) -> None:
        self._redis = redis
        self._backoff = reconnecting()
        self._skips = skips or Skips()

    async def changes(self) -> AsyncGenerator[T]:
        """Yields stored values, then changes, until closed; waits while Redis is away."""
        while True:
            try:
                async with aclosing(self._connected()) as changes:
                    async for change in changes:
                        yield change
            except (RedisError, OSError) as error:
                self._failed(error)
                await asyncio.sleep(self._backoff.next())

    @abstractmethod
    def _connected(self) -> AsyncGenerator[T]:
        """Yields stored values, then changes, until a RedisError."""

    def _failed(self, error: Exception) -> None:
        """Called after each failed attempt to read."""


class ChannelReader(Reader[T]):
    """Reads the stored values of keys, and then the channel to which Redis pushes their changes."""

    def __init__(self, redis: Redis, pool: str, channel: str, skips: Skips | None) -> None:
        super().__init__(redis, skips)
        self._keys = Keys(pool)
        self._channel = channel

    async def _connected(self) -> AsyncGenerator[T]:
        async with self._redis.pubsub() as pubsub:
            await in_time(pubsub.subscribe(self._channel))
            while True:
                message = await _next_message(pubsub)
                if message["type"] == "subscribe":
                    # The channel brings every change from now on. redis-py resubscribes if needed.
                    async for change in self._found():
                        yield change
                    self._backoff.reset()
                elif message["type"] == "message":
                    async for change in self._pushed(message["data"]):
                        yield change

    @abstractmethod
    def _found(self) -> AsyncIterator[T]:
        """Yields the stored values."""

    @abstractmethod
    def _pushed(self, data: bytes) -> AsyncIterator[T]:
        """Yields the changes in a message."""


async def _next_message(pubsub: PubSub) -> Any:
    """Waits for a message. If none arrives for ``TIMEOUT_S``, makes Redis send a message of the
    type ``unsubscribe``, to detect a dead connection.

    PING does not suit: a Redis that cannot save its data would refuse each PING.
    """
    # get_message reconnects without a time limit.
    message = await in_time(pubsub.get_message(timeout=TIMEOUT_S), TIMEOUT_S)
    if message is None:
        await in_time(pubsub.unsubscribe(_NO_CHANNEL))
        message = await in_time(pubsub.get_message(timeout=None))
    return message
