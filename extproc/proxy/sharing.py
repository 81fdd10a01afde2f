"""The router among others: it tells what it has in flight, and hears what they have."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from random import Random

from redis.asyncio import Redis
from redis.exceptions import RedisError

from extproc.config import Config
from extproc.fleet.announcements import MOST_HELD, MOST_KEPT, Holders
from extproc.fleet.digest import EVERY_S
from extproc.fleet.fleet import Fleet
from extproc.fleet.members import MODELS_REMEMBERED, REMEMBERED_S
from extproc.ground.clock import Clock, monotonic, wall
from extproc.ground.runtime import in_turns
from extproc.observe.metrics import RouterMetrics
from extproc.share.blocks import BlockReader
from extproc.share.connection import Keys, connect, reconnecting
from extproc.share.departed import DepartedModels
from extproc.share.digests import Connected, CutOff, DigestReader, DigestWriter, Heard, News
from extproc.share.envelope import Kind, Skips
from extproc.share.owners import living
from extproc.share.streams import OWNER, PROMPTS, B, Owner, Prompts, StreamReader, StreamWriter

_HELD_AT_ONCE = 100
_POLLERS_EVERY_S = 1.0
_MODELS_EVERY_S = 5.0
_ALONE_S = 0.25  # between two batches of prompts where only routers that start later read them


async def share(config: Config, fleet: Fleet, metrics: RouterMetrics) -> None:
    """Tells and hears, for ever; says farewell when it is cancelled."""
    pool, skips, random = config.pool, Skips(metrics.skipped), Random()
    async with connect(config.redis, pool) as redis, asyncio.TaskGroup() as tasks:
        keys = Keys(pool)

        def stream(key: str, kind: Kind[B]) -> StreamReader[B]:
            return StreamReader(redis, key, kind, random, skips)

        tasks.create_task(tell(DigestWriter(redis, pool), fleet, metrics))
        tasks.create_task(hear(DigestReader(redis, pool, random, skips), fleet, metrics))
        owned = [(fleet.responses, keys.responses)]
        if config.route.keeps_sessions:
            owned.append((fleet.sessions, keys.sessions))
        for holders, key in owned:
            tasks.create_task(tell_holders(StreamWriter(redis, key, OWNER, MOST_HELD), holders))
            tasks.create_task(hear_holders(stream(key, OWNER), holders))
        tasks.create_task(hear_blocks(BlockReader(redis, pool, random, monotonic, skips), fleet))
        tasks.create_task(hear_pollers(redis, pool, fleet))
        departed = DepartedModels(redis, pool, MODELS_REMEMBERED, REMEMBERED_S)
        tasks.create_task(remember_models(departed, fleet))
        prompts = StreamWriter(redis, keys.prompts, PROMPTS, MOST_KEPT)
        tasks.create_task(tell_prompts(prompts, fleet))
        tasks.create_task(hear_prompts(stream(keys.prompts, PROMPTS), fleet, skips))


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
    async with aclosing(reader.changes()) as changes:
        async for change in changes:
            take(change, fleet, metrics)


async def tell_holders(writer: StreamWriter[Owner], holders: Holders) -> None:
    """Tells who holds what, as this router saw it, for ever; while Redis is away that waits."""
    while True:
        held = await holders.untold(_HELD_AT_ONCE)
        await _deliver(writer, [Owner(thing, replica) for thing, replica in held])


async def hear_holders(reader: StreamReader[Owner], holders: Holders) -> None:
    """Remembers who holds what, by every router's word, for ever."""
    async with aclosing(reader.changes()) as changes:
        async for owner in changes:
            holders.keep(owner.thing, owner.replica)


async def hear_blocks(reader: BlockReader, fleet: Fleet) -> None:
    """Brings what replicas hold, by their own word, into the fleet, for ever."""
    async with aclosing(reader.changes()) as changes:
        async for change in changes:
            if fleet.blocks.follows(change.replica, change.news):
                await in_turns(fleet.blocks.apply(change.replica, change.news))
            else:
                reader.forget(change.replica)


async def tell_prompts(writer: StreamWriter[Prompts], fleet: Fleet) -> None:
    """Tells which prompts this router sent where, for ever; while Redis is away they wait."""
    while True:
        if prompts := fleet.sent.take():
            await _deliver(writer, [Prompts(fleet.router, prompts)])
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


async def remember_models(store: DepartedModels, fleet: Fleet) -> None:
    """Recalls which models were served lately, then stores each that departs, for ever."""
    members, told, recalled = fleet.members, dict[str, float](), False
    while True:
        epoch = wall() - monotonic()
        with suppress(RedisError, OSError):
            if not recalled:
                stored = await store.read()
                members.recall({model: at - epoch for model, at in stored.items()})
                recalled = True
            departed = members.departed_models.copy()
            if news := dict(departed.items() - told.items()):
                await store.write({model: at + epoch for model, at in news.items()})
                told = departed
        await asyncio.sleep(_MODELS_EVERY_S)


async def hear_prompts(reader: StreamReader[Prompts], fleet: Fleet, skips: Skips) -> None:
    """Brings what other routers sent into the fleet, for ever.

    Some of it is past, and about replicas that have to be known by then.
    """
    await fleet.known.wait()
    async with aclosing(reader.changes()) as changes:
        async for told in changes:
            try:
                fleet.hear_prompts(told.router, told.prompts)
            except ValueError as error:
                skips.garbage(reader.key, error)
            await asyncio.sleep(0)  # many may be there; requests come first


async def _deliver(writer: StreamWriter[B], entries: Sequence[B]) -> None:
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
