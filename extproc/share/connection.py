"""The connection to Redis, and what is logged of it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

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
    ask_cluster,
    ask_sentinel,
)

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0
"""Redis answers within a millisecond or so: after a second without an answer it counts as gone."""

_PORT = 6379

_ONCE = {
    "socket_timeout": None,
    "socket_connect_timeout": TIMEOUT_S,
    "retry": Retry(NoBackoff(), 0),
}


class Keys:
    """Names of one pool's keys and channels in Redis.

    The pool stands in braces: a Redis Cluster keeps all of a pool in one slot. A name that ends in
    a colon goes on with a replica (``ip:port``), a poller or a router. All but the set of pollers,
    departed models and KV streams hold envelopes.
    """

    def __init__(self, pool: str) -> None:
        tag = f"{{{pool}}}:"
        self.slot = f"{tag}slot"  # never written: its hash slot is the pool's
        self.replica = f"{tag}replica:"  # a state, which expires
        self.lists = f"{tag}lists:"  # models and adapters that states name, by hash
        self.changes = f"{tag}changes"  # channel of each change of a state, with the new value
        self.drains = f"{tag}drains"  # hash of the replicas that commands drain
        self.departed_models = f"{tag}departed-models"  # when each was last served: a sorted set
        self.poller = f"{tag}poller:"  # a poller's heartbeat, which expires
        self.pollers = f"{tag}poller-names"  # set of the pollers' names; some may be dead
        self.router = f"{tag}router:"  # a router's digest, which expires
        self.digests = f"{tag}digests"  # channel of all digests
        self.responses = f"{tag}responses"  # stream of the owners of stored responses
        self.sessions = f"{tag}sessions"  # stream of the owners of sessions
        self.prompts = f"{tag}prompts"  # stream of the prompts that routers sent
        self.blocks = f"{tag}blocks:"  # list of a replica's KV blocks: all, and changes since then
        self.blocks_channel = f"{tag}blocks"  # channel of changes of KV blocks
        self.kv_stream = f"{tag}kv-stream:"  # where the next poller goes on with KV events


def connect(redis: RedisSettings | str, pool: str) -> Redis:
    """Returns a client of the server that holds the pool's keys, in whatever form Redis is run.

    It connects when first used; close it with ``aclose()``. Each new connection asks again where
    that server is, and a server that may no longer be written to ends its connections: so whoever
    tries again follows a fail-over.

    It tries a command once: the caller, who knows whether the value is still the newest, decides
    about another try. It waits for an answer as long as it takes: put ``in_time()`` around each
    round trip. (The client's own ``socket_timeout`` loses a task's cancellation now and then, since
    it uses ``asyncio.wait_for``, which does so before Python 3.12.)

    Args:
        redis: the settings, or the URL of one server.
        pool: whose keys a Cluster is asked for.
    """
    settings = RedisSettings(url=redis) if isinstance(redis, str) else redis
    options = settings.options | _ONCE
    tls = options.pop("connection_class", None) is SSLConnection
    if "path" in options:
        return Redis(unix_socket_path=options.pop("path"), **options)
    node = options.pop("host", ""), options.pop("port", _PORT)
    server = Server([node])
    asking = SSLConnection if tls else Connection
    if settings.service is not None:
        login = {"username": settings.sentinel_username, "password": settings.sentinel_password}
        nodes = [split_address(one) for one in settings.sentinels]
        kind, ask = f"{settings.service} of sentinels ", ask_sentinel(settings.service)
        server = Server(nodes, kind, ask, asking, options | login | {"db": 0})
    elif settings.cluster:
        nodes = [split_address(one) for one in settings.cluster]
        server = Server(nodes, "cluster ", ask_cluster(Keys(pool).slot), asking, options)
    connection = LocatedTlsConnection if tls else LocatedConnection
    return Redis.from_pool(ConnectionPool(connection_class=connection, server=server, **options))


def reconnecting(random: Random) -> Backoff:
    """Waits between attempts to reach Redis: at most half of the second within which a router is to
    be full again after Redis is back."""
    return Backoff(0.05, 0.5, random)


@asynccontextmanager
async def in_time(wait_s: float = 0.0) -> AsyncIterator[None]:
    """Bounds what is done inside to ``TIMEOUT_S``, beside ``wait_s`` that it may wait for news.

    Raises:
        redis.exceptions.TimeoutError: it took longer.
    """
    try:
        async with asyncio.timeout(wait_s + TIMEOUT_S):
            yield
    except TimeoutError:
        raise RedisTimeoutError(f"no answer within {TIMEOUT_S:g} s") from None


def address(redis: Redis) -> str:
    """Returns where the client connects to, without its password."""
    options = redis.connection_pool.connection_kwargs
    return str(options["path"] if "path" in options else options["server"])


def outage(redis: Redis) -> OutageLog:
    """Returns the log of a Redis that is away."""
    return OutageLog(log, "redis is lost, retrying", "redis is back", redis=address(redis))
