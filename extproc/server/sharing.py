"""The router among others: it tells what it has in flight, and hears what they have."""

import asyncio
from contextlib import aclosing, suppress
from random import Random

from redis.exceptions import RedisError

from extproc.backoff import Backoff
from extproc.clock import Clock, monotonic, wall
from extproc.config import Config
from extproc.fleet.digest import EVERY_S
from extproc.fleet.fleet import Fleet
from extproc.fleet.holders import Holders
from extproc.observe.metrics import RouterMetrics
from extproc.state.connection import connect
from extproc.state.digests import Connected, CutOff, DigestReader, DigestWriter, Heard, News
from extproc.state.holders import HolderReader, HolderWriter
from extproc.state.keys import responses_key, sessions_key
from extproc.state.store import RECONNECT_FIRST_S, RECONNECT_MOST_S

_HELD_AT_ONCE = 100


async def share(config: Config, fleet: Fleet, metrics: RouterMetrics) -> None:
    """Tells and hears, for ever; says farewell when it is cancelled."""
    async with connect(config.redis.url, config.pool) as redis, asyncio.TaskGroup() as tasks:
        tasks.create_task(tell(DigestWriter(redis, config.pool), fleet))
        tasks.create_task(hear(DigestReader(redis, config.pool, Random()), fleet, metrics))
        kinds = [(fleet.responses, responses_key(config.pool))]
        if config.route.keeps_sessions:
            kinds.append((fleet.sessions, sessions_key(config.pool)))
        for holders, key in kinds:
            tasks.create_task(tell_holders(HolderWriter(redis, key), holders))
            tasks.create_task(hear_holders(HolderReader(redis, key, Random()), holders))


async def tell(writer: DigestWriter, fleet: Fleet, clock: Clock = monotonic) -> None:
    """Sends each digest when it is due, for ever; the last one when it is cancelled."""
    backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MOST_S, Random())
    try:
        while True:
            started = clock()
            digest = fleet.digests.due(started, alone=not fleet.others.expected)
            try:
                if digest is not None:
                    await writer.send(digest)
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


async def tell_holders(writer: HolderWriter, holders: Holders) -> None:
    """Tells who holds what, as this router saw it, for ever; while Redis is away that waits."""
    backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MOST_S, Random())
    while True:
        held = await holders.untold(_HELD_AT_ONCE)
        while True:
            try:
                await writer.send(held)
                break
            except (RedisError, OSError):
                await asyncio.sleep(backoff.next())
        backoff.reset()


async def hear_holders(reader: HolderReader, holders: Holders) -> None:
    """Remembers who holds what, by every router's word, for ever."""
    async with aclosing(reader.news()) as news:
        async for thing, replica in news:
            holders.keep(thing, replica)


def take(news: News, fleet: Fleet, metrics: RouterMetrics) -> None:
    """What was heard, brought into the fleet."""
    match news:
        case Heard(digest, age):
            if digest.router != fleet.router and not age:
                metrics.digest_age.observe(max(wall() - digest.sent_at, 0.0))
            fleet.hear(digest, age)
        case Connected():
            fleet.others.connected()
        case CutOff():
            fleet.others.cut_off()
