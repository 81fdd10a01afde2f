"""The router among others: it tells what it has in flight, and hears what they have."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from random import Random

from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.utils import str_if_bytes

from extproc.config import Config
from extproc.fleet.announcements import MOST_HELD, MOST_KEPT, Holders
from extproc.fleet.digest import EVERY_S
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import Clock, monotonic, wall
from extproc.observe.metrics import RouterMetrics
from extproc.share.blocks import BlockReader
from extproc.share.connection import connect, reconnecting
from extproc.share.digests import Connected, CutOff, DigestReader, DigestWriter, Heard, News
from extproc.share.keys import Keys
from extproc.share.leases import living
from extproc.share.read import Garbage
from extproc.share.stream import Fields, StreamReader, StreamWriter

_HELD_AT_ONCE = 100
_POLLERS_EVERY_S = 1.0
_ALONE_S = 0.25  # between two batches of prompts where only routers that start later read them


async def share(config: Config, fleet: Fleet, metrics: RouterMetrics) -> None:
    """Tells and hears, for ever; says farewell when it is cancelled."""
    async with connect(config.redis, config.pool) as redis, asyncio.TaskGroup() as tasks:
        tasks.create_task(tell(DigestWriter(redis, config.pool), fleet, metrics))
        tasks.create_task(hear(DigestReader(redis, config.pool, Random()), fleet, metrics))
        keys = Keys(config.pool)
        kinds = [(fleet.responses, keys.responses)]
        if config.route.keeps_sessions:
            kinds.append((fleet.sessions, keys.sessions))
        for holders, key in kinds:
            tasks.create_task(tell_holders(StreamWriter(redis, key, MOST_HELD), holders))
            tasks.create_task(hear_holders(StreamReader(redis, key, Random()), holders))
        blocks = BlockReader(redis, config.pool, Random(), monotonic)
        tasks.create_task(hear_blocks(blocks, fleet))
        tasks.create_task(hear_pollers(redis, config.pool, fleet))
        tasks.create_task(tell_prompts(StreamWriter(redis, keys.prompts, MOST_KEPT), fleet))
        tasks.create_task(hear_prompts(StreamReader(redis, keys.prompts, Random()), fleet))


async def tell(
    writer: DigestWriter, fleet: Fleet, metrics: RouterMetrics, clock: Clock = monotonic
) -> None:
    """Sends each digest when it is due, for ever; the last one when it is cancelled."""
    backoff = reconnecting(Random())
    try:
        while True:
            started = clock()
            digest = fleet.digests.due(started, no_peers=not fleet.peers.expected)
            try:
                if digest is not None:
                    await writer.send(digest)
                    metrics.redis_seconds.observe(clock() - started)
                    backoff.reset()
            except (RedisError, OSError):
                fleet.digests.repeat()
                await asyncio.sleep(backoff.next())
            await asyncio.sleep(max(EVERY_S - (clock() - started), 0.0))
    finally:
        with suppress(RedisError, OSError):
            await writer.send(fleet.digests.farewell())


async def hear(reader: DigestReader, fleet: Fleet, metrics: RouterMetrics) -> None:
    """Brings every router's digests into the fleet, for ever."""
    async with aclosing(reader.news()) as news:
        async for one in news:
            take(one, fleet, metrics)


async def tell_holders(writer: StreamWriter, holders: Holders) -> None:
    """Tells who holds what, as this router saw it, for ever; while Redis is away that waits."""
    while True:
        held = await holders.untold(_HELD_AT_ONCE)
        await _deliver(writer, [{thing: replica} for thing, replica in held])


async def hear_holders(reader: StreamReader, holders: Holders) -> None:
    """Remembers who holds what, by every router's word, for ever."""
    async with aclosing(reader.news()) as news:
        async for told in news:
            for thing, replica in told.items():
                holders.keep(str_if_bytes(thing), str_if_bytes(replica))


async def hear_blocks(reader: BlockReader, fleet: Fleet) -> None:
    """Brings what replicas hold, by their own word, into the fleet, for ever."""
    async with aclosing(reader.news()) as news:
        async for replica, one in news:
            if not fleet.blocks.hear(replica, one):
                reader.forget(replica)
            await asyncio.sleep(0)


async def tell_prompts(writer: StreamWriter, fleet: Fleet) -> None:
    """Tells which prompts this router sent where, for ever; while Redis is away they wait."""
    while True:
        if prompts := fleet.sent.take():
            await _deliver(writer, [{fleet.router: prompts}])
        urgent = fleet.peers.expected or len(fleet.sent) > 0
        await asyncio.sleep(EVERY_S if urgent else _ALONE_S)


async def hear_pollers(redis: Redis, pool: str, fleet: Fleet) -> None:
    """Brings which pollers are alive into the fleet, for ever."""
    while True:
        try:
            fleet.pollers = await living(redis, pool)
        except (RedisError, OSError):
            fleet.pollers = None
        await asyncio.sleep(_POLLERS_EVERY_S)


async def hear_prompts(reader: StreamReader, fleet: Fleet) -> None:
    """Brings what other routers sent into the fleet, for ever.

    There are some of the past, of replicas that have to be known by then.
    """
    await fleet.known.wait()
    garbage = Garbage()
    async with aclosing(reader.news()) as news:
        async for told in news:
            for router, prompts in told.items():
                try:
                    fleet.hear_prompts(str_if_bytes(router), prompts)
                except ValueError as error:
                    garbage.skipped("prompts", error)
            await asyncio.sleep(0)  # many may be there; requests come first


async def _deliver(writer: StreamWriter, entries: Sequence[Fields]) -> None:
    """Tries until Redis has taken them."""
    backoff = reconnecting(Random())
    while True:
        try:
            return await writer.send(entries)
        except (RedisError, OSError):
            await asyncio.sleep(backoff.next())


def take(news: News, fleet: Fleet, metrics: RouterMetrics) -> None:
    """What was heard, brought into the fleet."""
    match news:
        case Heard(digest, age):
            if digest.router != fleet.router and not age:
                metrics.digest_age.observe(max(wall() - digest.sent_at, 0.0))
            fleet.hear(digest, age)
        case Connected():
            fleet.peers.connected()
        case CutOff():
            fleet.peers.cut_off()
