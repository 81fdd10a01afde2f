"""The connection to Redis, and what is logged of it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import TimeoutError as RedisTimeoutError

from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import Backoff
from extproc.redis_url import parse
from extproc.share.keys import Keys
from extproc.share.location import (
    LocatedConnection,
    LocatedTlsConnection,
    Primary,
    Server,
    SlotOwner,
)

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0
"""Redis answers within a millisecond or so: after a second without an answer it counts as gone."""

_ONCE = {
    "socket_timeout": None,
    "socket_connect_timeout": TIMEOUT_S,
    "retry": Retry(NoBackoff(), 0),
}


def connect(url: str, pool: str) -> Redis:
    """Return a client of the server that holds the pool's keys, in whatever form Redis is run.

    It connects when first used; close it with ``aclose()``. Each new connection asks again where
    that server is, and a server that may no longer be written to ends its connections: so whoever
    tries again follows a fail-over.

    It tries a command once: what is worth another try is for the caller to say, who knows whether
    the value is still the newest. It waits for an answer as long as it takes: put ``in_time()``
    around each round trip. (The client's own ``socket_timeout`` loses a task's cancellation now and
    then, since it uses ``asyncio.wait_for``, which does so before Python 3.12.)

    Raises:
        ValueError: the URL is none of Redis, or names TLS files that cannot be used. The message
            holds nothing secret.
    """
    parsed = parse(url)
    options = dict(parsed.options) | _ONCE
    login = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    match parsed.form:
        case "unix":
            return Redis(unix_socket_path=parsed.path, **options)
        case "sentinel":
            server: Server = Primary(parsed, options | login | {"db": 0})
        case "cluster":
            server = SlotOwner(parsed, options, Keys(pool).slot)
        case _:
            server = Server(parsed)
    kind = LocatedTlsConnection if parsed.tls else LocatedConnection
    return Redis.from_pool(ConnectionPool(connection_class=kind, server=server, **options))


def reconnecting(random: Random) -> Backoff:
    """Waits between attempts to reach Redis: at most half of the second within which a router is to
    be full again after Redis is back."""
    return Backoff(0.05, 0.5, random)


@asynccontextmanager
async def in_time(wait_s: float = 0.0) -> AsyncIterator[None]:
    """Bound what is done inside to ``TIMEOUT_S``, beside ``wait_s`` that it may wait for news.

    Raises:
        redis.exceptions.TimeoutError: it took longer.
    """
    try:
        async with asyncio.timeout(wait_s + TIMEOUT_S):
            yield
    except TimeoutError:
        raise RedisTimeoutError(f"no answer within {TIMEOUT_S:g} s") from None


def address(redis: Redis) -> str:
    """Return where the client connects to, without its password."""
    options = redis.connection_pool.connection_kwargs
    return str(options["path"] if "path" in options else options["server"])


def outage(redis: Redis) -> OutageLog:
    """What is logged of a Redis that is away."""
    return OutageLog(log, "redis is lost, retrying", "redis is back", redis=address(redis))
