"""The connection to Redis, and what is logged of it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import TimeoutError as RedisTimeoutError

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0
"""Redis answers within a millisecond or so: after a second without an answer it counts as gone."""


def connect(url: str) -> Redis:
    """Return a client that connects when first used; close it with ``aclose()``.

    It tries a command once: what is worth another try is for the caller to say, who knows whether
    the value is still the newest. It waits for an answer as long as it takes: put ``in_time()``
    around each round trip. (The client's own ``socket_timeout`` loses a task's cancellation now and
    then, since it uses ``asyncio.wait_for``, which does so before Python 3.12.)

    Raises:
        ValueError: the URL has no scheme that Redis knows.
    """
    return Redis.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )


@asynccontextmanager
async def in_time() -> AsyncIterator[None]:
    """Bound what is done inside to ``TIMEOUT_S``.

    Raises:
        redis.exceptions.TimeoutError: it took longer.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield
    except TimeoutError:
        raise RedisTimeoutError(f"no answer within {TIMEOUT_S:g} s") from None


def address(redis: Redis) -> str:
    """Return where the client connects to, without its password."""
    options = redis.connection_pool.connection_kwargs
    if "path" in options:
        return str(options["path"])
    return f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


class Outage:
    """Logs one line when Redis is lost and one when it is back."""

    def __init__(self, redis: Redis) -> None:
        self._address = address(redis)
        self._lost = False

    def failed(self, error: Exception) -> None:
        """Note a failed attempt."""
        if not self._lost:
            extra = {"redis": self._address, "error": str(error)}
            log.warning("redis is lost, retrying", extra=extra)
        self._lost = True

    def succeeded(self) -> None:
        """Note a successful attempt."""
        if self._lost:
            log.warning("redis is back", extra={"redis": self._address})
        self._lost = False
