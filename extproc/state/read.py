"""What every reader of Redis does: looks for keys, and waits for messages."""

from collections.abc import AsyncGenerator
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError as RedisConnectionError

from extproc.state.connection import TIMEOUT_S, in_time

_SCAN_PAGE = 1000


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


async def messages_of(pubsub: PubSub) -> AsyncGenerator[dict[str, Any]]:
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
