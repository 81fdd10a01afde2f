"""Connection to Redis, its time limits, and the log of its outages."""

import asyncio
import logging
from collections.abc import Awaitable
from functools import partial
from random import Random
from typing import TypeVar

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import TimeoutError as RedisTimeoutError

from extproc.config import RedisSettings
from extproc.ground.address import split_address
from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import Backoff
from extproc.share.location import (
    LocatedConnection,
    LocatedTlsConnection,
    Server,
    TlsConnection,
    ask_cluster,
    ask_sentinel,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 1.0
"""Time without an answer after which Redis counts as away; Redis usually answers within 1 ms."""

_PORT = 6379

_ONCE = {
    "socket_timeout": None,
    "socket_connect_timeout": TIMEOUT_S,
    "retry": Retry(NoBackoff(), 0),
}


class Keys:
    """Names of one pool's keys and channels in Redis.

    The pool's name stands in braces, so that all keys are in one slot of a Redis Cluster. A name
    that ends in a colon is a prefix of keys: the name of a replica (``ip:port``), poller or router,
    or a hash, follows. All values but ``pollers``, ``departed_models`` and ``kv_stream`` are
    envelopes.
    """

    def __init__(self, pool: str) -> None:
        tag = f"{{{pool}}}:"
        self.slot = f"{tag}slot"  # never written; has the pool's hash slot
        self.replica = f"{tag}replica:"  # state, which expires
        self.lists = f"{tag}lists:"  # models and adapters of states, by hash
        self.changes = f"{tag}changes"  # channel of new and removed states
        self.drains = f"{tag}drains"  # hash of the replicas that commands drain
        self.departed_models = f"{tag}departed-models"  # sorted set, by time
        self.poller = f"{tag}poller:"  # heartbeat, which expires
        self.pollers = f"{tag}poller-names"  # set of names, dead pollers included
        self.router = f"{tag}router:"  # digest, which expires
        self.digests = f"{tag}digests"  # channel of all digests
        self.responses = f"{tag}responses"  # stream of the owners of stored responses
        self.sessions = f"{tag}sessions"  # stream of the owners of sessions
        self.prompts = f"{tag}prompts"  # stream of the prompts that routers sent
        self.blocks = f"{tag}blocks:"  # list: whole update of KV blocks, and later updates
        self.blocks_channel = f"{tag}blocks"  # channel of all updates of KV blocks
        self.kv_stream = f"{tag}kv-stream:"  # position in the KV events, for the next poller


def connect(redis: RedisSettings | str, pool: str) -> Redis:
    """Returns a client of the server, Sentinel service or Cluster node with the pool's keys.

    The client connects when first used; close it with ``aclose()``. Each new connection looks up
    the server again, and a connection ends when its server becomes read-only. So after a fail-over
    a retry reaches the new primary.

    The client never retries a command, because only the caller knows if the value is still the
    newest. The client waits without limit: put ``in_time()`` around each answer. (A
    ``socket_timeout`` can lose a cancellation, as ``asyncio.wait_for`` does before Python 3.12.)

    ``redis``: the settings, or the URL of one server.
    """
    settings = RedisSettings(url=redis) if isinstance(redis, str) else redis
    options = settings.options | _ONCE
    tls = options.pop("connection_class", None) is SSLConnection
    if "path" in options:
        return Redis(unix_socket_path=options.pop("path"), **options)
    server = Server([(options.pop("host", ""), options.pop("port", _PORT))])
    nodes = [split_address(address) for address in settings.sentinels or settings.cluster]
    asking = partial(TlsConnection if tls else Connection, **options)
    if settings.service is not None:
        login = {"username": settings.sentinel_username, "password": settings.sentinel_password}
        kind, ask = f"{settings.service} of sentinels ", partial(ask_sentinel, settings.service)
        server = Server(nodes, kind, ask, partial(asking, **login, db=0))
    elif settings.cluster:
        server = Server(nodes, "cluster ", partial(ask_cluster, Keys(pool).slot), asking)
    connection = LocatedTlsConnection if tls else LocatedConnection
    return Redis.from_pool(ConnectionPool(connection_class=connection, server=server, **options))


def reconnecting() -> Backoff:
    """Returns the waits between attempts to reach Redis: at most half a second, so that a router
    has all data again within a second after Redis is back."""
    return Backoff(0.05, 0.5, Random())


async def in_time(answer: Awaitable[T], wait_s: float = 0.0) -> T:
    """Waits for Redis's answer; raises Redis's TimeoutError after ``wait_s`` + ``TIMEOUT_S``."""
    try:
        async with asyncio.timeout(wait_s + TIMEOUT_S):
            return await answer
    except TimeoutError:
        raise RedisTimeoutError(f"no answer within {TIMEOUT_S:g} s") from None


def address(redis: Redis) -> str:
    """Returns the server that the client connects to, without the password."""
    options = redis.connection_pool.connection_kwargs
    return str(options["path"] if "path" in options else options["server"])


def outage(redis: Redis) -> OutageLog:
    """Returns a log for outages of Redis."""
    return OutageLog(log, "redis is lost, retrying", "redis is back", redis=address(redis))
