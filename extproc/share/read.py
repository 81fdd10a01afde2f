"""What every reader of Redis does: finds keys, follows a channel, passes over garbage."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from random import Random
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.utils import str_if_bytes

from extproc.share.connection import TIMEOUT_S, in_time, reconnecting
from extproc.share.keys import Keys

log = logging.getLogger(__name__)

_SCAN_PAGE = 1000

D = TypeVar("D")
T = TypeVar("T")


class Garbage:
    """What could not be read: one warning of each key or channel, for what writes garbage once
    writes it again and again."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def skipped(self, source: str, problem: ValueError) -> None:
        """Something that came from there, for that reason."""
        if source not in self._warned:
            self._warned.add(source)
            text = str(problem)
            if isinstance(problem, ValidationError):  # without the value itself
                text = problem.errors(include_url=False, include_input=False)[0]["msg"]
            log.warning("skipped garbage in redis", extra={"source": source, "error": text})

    def read(self, source: str, parse: Callable[[D], T], data: D) -> T | None:
        """What came from there, parsed; None for garbage."""
        try:
            return parse(data)
        except ValueError as error:
            self.skipped(source, error)
            return None


async def keys_after(redis: Redis, beginning: str) -> list[str]:
    """The keys with that beginning, found page by page, which keeps nobody else waiting."""
    keys: set[str] = set()
    cursor = 0
    while True:
        async with in_time():
            cursor, page = await redis.scan(cursor, match=f"{beginning}*", count=_SCAN_PAGE)
        keys.update(map(str_if_bytes, page))
        if cursor == 0:
            return sorted(keys)


class Follower(ABC, Generic[T]):
    """Yields what Redis has, then all that is pushed into a channel, for ever.

    Where it is cut off it begins anew. Of that the reader of replica states logs, for all.
    """

    def __init__(self, redis: Redis, pool: str, random: Random) -> None:
        self._redis = redis
        self._keys = Keys(pool)
        self._backoff = reconnecting(random)
        self._garbage = Garbage()

    async def _follow(self, channel: str) -> AsyncGenerator[T]:
        while True:
            try:
                async with aclosing(self._connected(channel)) as news:
                    async for one in news:
                        yield one
            except (RedisError, OSError) as error:
                for one in self._cut_off(error):
                    yield one
                await asyncio.sleep(self._backoff.next())

    async def _connected(self, channel: str) -> AsyncGenerator[T]:
        async with self._redis.pubsub() as pubsub, aclosing(_messages_of(pubsub)) as messages:
            async with in_time():
                await pubsub.subscribe(channel)
            async for message in messages:
                if message["type"] == "subscribe":
                    # Nothing is missed from now on; the client subscribes again by itself.
                    async for one in self._found():
                        yield one
                    self._backoff.reset()
                    async with in_time():
                        await pubsub.ping()
                elif message["type"] == "message":
                    for one in await self._pushed(message["data"]):
                        yield one
                elif message["type"] == "pong":
                    self._caught_up()

    @abstractmethod
    def _found(self) -> AsyncIterator[T]:
        """What Redis has."""

    @abstractmethod
    async def _pushed(self, data: bytes) -> Iterable[T]:
        """What a message says."""

    def _caught_up(self) -> None:
        """All that was pushed before it was found what Redis has is passed."""

    def _cut_off(self, error: Exception) -> Iterable[T]:
        """What an attempt that failed says."""
        return ()


async def _messages_of(pubsub: PubSub) -> AsyncGenerator[dict[str, Any]]:
    """Yield what arrives; ping when nothing does, so that a dead connection is noticed."""
    pinged = False
    while True:
        async with in_time(TIMEOUT_S):  # a lost connection is made anew inside, without a bound
            message = await pubsub.get_message(timeout=TIMEOUT_S)
        if message is not None:
            pinged = False
            yield message
        elif pinged:
            raise RedisConnectionError(f"no answer within {TIMEOUT_S:g} s")
        else:
            async with in_time():
                await pubsub.ping()
            pinged = True
