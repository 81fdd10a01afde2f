"""What every reader of Redis does: looks for keys, waits for messages, and passes over garbage."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError as RedisConnectionError

from extproc.store.connection import TIMEOUT_S, in_time

log = logging.getLogger(__name__)

_SCAN_PAGE = 1000


class Garbage:
    """What could not be read: one warning of each key or channel, for what writes garbage once
    writes it again and again."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def skipped(self, source: str, problem: object) -> None:
        """Something that came from there, for that reason."""
        if source not in self._warned:
            self._warned.add(source)
            extra = {"source": source, "error": str(problem)}
            log.warning("skipped garbage in redis", extra=extra)


def what_is_wrong(error: ValidationError) -> str:
    """With a value that is none of its model, without the value itself."""
    return error.errors(include_url=False, include_input=False)[0]["msg"]


async def keys_like(redis: Redis, pattern: str) -> set[bytes | str]:
    """The keys that match a pattern, found page by page, which keeps nobody else waiting.

    Raises:
        RedisError: Redis did not tell.
    """
    keys: set[bytes | str] = set()
    cursor = 0
    while True:
        async with in_time():
            cursor, page = await redis.scan(cursor, match=pattern, count=_SCAN_PAGE)
        keys.update(page)
        if cursor == 0:
            return keys


async def pushed(redis: Redis, channel: str) -> AsyncGenerator[Any]:
    """Yield what is pushed into a channel, and None when from then on nothing of it is missed: at
    first, and whenever the client has reconnected, for it subscribes again by itself.

    Raises:
        RedisError: Redis cannot be heard.
    """
    async with redis.pubsub() as pubsub, aclosing(_messages_of(pubsub)) as messages:
        async with in_time():
            await pubsub.subscribe(channel)
        async for message in messages:
            if message["type"] == "subscribe":
                yield None
            elif message["type"] == "message":
                yield message["data"]


async def _messages_of(pubsub: PubSub) -> AsyncGenerator[dict[str, Any]]:
    """Yield what arrives; ping when nothing does, so that a dead connection is noticed.

    Raises:
        RedisConnectionError: nothing came for ``TIMEOUT_S`` after a ping, or the connection ended.
    """
    pinged = False
    while True:
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
