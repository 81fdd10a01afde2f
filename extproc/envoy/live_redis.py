"""What there is to say about Redis: whether it does what routers and pollers ask of it."""

from random import Random

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from redis.utils import str_if_bytes

from extproc.config import Config
from extproc.envoy.finding import Finding, Level
from extproc.ground.clock import monotonic
from extproc.share.connection import address, connect, in_time
from extproc.share.keys import Keys
from extproc.share.leases import living
from extproc.share.replicas import Snapshot, StateReader

_AWAY = (
    "{}: routers and pollers go on by themselves. Start it, or put right redis.url; a router that "
    "is alone needs none (state: memory)"
)
_REFUSES = (
    "refuses what routers and pollers do: {}. Give their user the rights that docs/operations.md "
    "lists (Redis)"
)
_NO_POLLER = "no poller of the pool {!r} is alive: what routers know gets old. Run 'extproc poll'"

_WRITES = "redis.call('TIME') return redis.call('DEL', KEYS[1])"
"""Of a key that is never there."""


async def check_redis(config: Config) -> tuple[list[Finding], Snapshot | None]:
    """Checks the Redis of one pool, and reads its replicas' states; None where that failed."""
    async with connect(config.redis, config.pool) as redis:
        where = f"redis {address(redis)}"
        try:
            began = monotonic()
            version = await _version(redis)
            took_s = monotonic() - began
            await _rights(redis, Keys(config.pool))
            pollers = await living(redis, config.pool)
            snapshot = await StateReader(redis, config.pool, Random()).read()
        except (RedisError, OSError) as error:
            wrong = _REFUSES if isinstance(error, ResponseError) else _AWAY
            text = wrong.format(str(error).rstrip("."))
            return [Finding("redis", Level.ERROR, where, text)], None
    told = f"version {version} answers in {took_s * 1e3:.1f} ms; pool {config.pool}: "
    counts = f"{len(pollers)} pollers alive, {len(snapshot.states)} replicas"
    found = [Finding("redis", Level.OK, where, told + counts)]
    if not pollers:
        found.append(Finding("redis", Level.ERROR, where, _NO_POLLER.format(config.pool)))
    return found, snapshot


async def _version(redis: Redis) -> str:
    """Asked for with what needs no right to administer."""
    async with in_time():
        await redis.ping()
    try:
        async with in_time():
            # redis-py leaves it untyped.
            told = await redis.execute_command("HELLO")  # type: ignore[no-untyped-call]
    except ResponseError:  # before 6.2
        return "not told"
    fields = told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))
    return str_if_bytes(fields[b"version"])


async def _rights(redis: Redis, keys: Keys) -> None:
    """Writes and tells, in ways that change nothing."""
    async with in_time():
        await redis.eval(_WRITES, 1, keys.slot)
        await redis.publish(keys.changes, "{}")
    async with redis.pubsub() as pubsub, in_time():
        await pubsub.subscribe(keys.changes)
        await pubsub.get_message(timeout=None)
