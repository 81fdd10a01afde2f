"""Exchange with pollers and other routers through Redis: states, digests, prompts, owners."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from extproc.config import Config
from extproc.fleet.announcements import MAX_OWNERS, MAX_PROMPT_BATCHES, OwnerMap
from extproc.fleet.digest import EVERY_S, DigestKind
from extproc.fleet.fleet import Fleet
from extproc.ground.address import reachable
from extproc.ground.clock import monotonic, wall
from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import in_turns, together
from extproc.observe.history import Delays
from extproc.observe.metrics import RouterMetrics
from extproc.share.assignment import known_pollers
from extproc.share.blocks import BlockReader
from extproc.share.connection import Keys, address, connect, reconnecting
from extproc.share.departed import read_departed, write_departed
from extproc.share.digests import (
    Connected,
    DigestEvent,
    DigestReader,
    DigestReceived,
    send_digest,
)
from extproc.share.envelope import Skips
from extproc.share.reader import Reader
from extproc.share.replicas import Change, Put, Removed, Snapshot, StateReader
from extproc.share.streams import OWNER, PROMPTS, Owner, Prompts, StreamReader, append

logger = logging.getLogger(__name__)

_UNSENT = "redis takes no digests, retrying: other routers do not know this router's requests"
_SENT = "redis takes digests again"
_OWNERS_AT_ONCE = 100
_POLLERS_EVERY_S = 1.0
_MODELS_EVERY_S = 5.0
_ALONE_S = 0.25  # between batches of prompts while there is no peer: only later routers read them

T = TypeVar("T")


async def share(config: Config, fleet: Fleet, metrics: RouterMetrics, delays: Delays) -> None:
    """Follows what pollers and other routers write, and sends them this router's state. Sends a
    farewell when cancelled."""
    pool, skips = config.pool, Skips(metrics.skipped)
    async with connect(config.redis, pool) as redis:
        keys = Keys(pool)
        prompts = StreamReader(redis, keys.prompts, PROMPTS, skips)
        parts = [
            _receive(StateReader(redis, pool, skips), partial(apply, fleet)),
            _publish_admin(fleet, config.serve.admin),
            _send_digests(redis, keys, fleet, metrics, delays),
            _receive(DigestReader(redis, pool, skips), partial(_take, fleet, metrics)),
            _send_prompts(redis, keys.prompts, fleet),
            _receive_prompts(prompts, fleet),
            _receive(
                BlockReader(redis, pool, fleet.blocks, skips),
                lambda change: fleet.blocks.apply(change.replica, change.update),
            ),
            _watch_pollers(redis, pool, fleet, skips),
            _remember_models(redis, pool, fleet),
        ]
        owned = [(fleet.responses, keys.responses)]
        if config.route.session_header or config.route.session_cookie:
            owned.append((fleet.sessions, keys.sessions))
        for owners, key in owned:
            reader = StreamReader(redis, key, OWNER, skips)
            parts.append(_send_owners(redis, key, owners))
            parts.append(_receive(reader, partial(_keep_owner, owners)))
        await together(*parts)


async def _receive(reader: Reader[T], take: Callable[[T], Iterator[None] | None]) -> None:
    """Calls ``take`` with each change, and goes through the steps that it returns. Lets other tasks
    run after each step and each change."""
    async with aclosing(reader.changes()) as changes:
        async for change in changes:
            await in_turns(take(change) or ())
            await asyncio.sleep(0)


def apply(fleet: Fleet, change: Change) -> Iterator[None]:
    """Applies a change of the replica states to the fleet; yields after each replica."""
    match change:
        case Snapshot(states, ages):
            # A Redis that was just started holds few replicas yet: a missing replica is dropped
            # only once it is stale. Replicas that are not measured come first: after a measured
            # replica they would count as newcomers.
            for state in sorted(states, key=lambda state: state.measured):
                fleet.put(state, age=ages.get(state.id, 0.0))
                yield
        case Put(state):
            # Age 0: a push takes less time than the clocks of two machines differ.
            fleet.put(state)
        case Removed(replica):
            fleet.remove(replica)


async def _send_digests(
    redis: Redis, keys: Keys, fleet: Fleet, metrics: RouterMetrics, delays: Delays
) -> None:
    outage, backoff = OutageLog(logger, _UNSENT, _SENT, redis=address(redis)), reconnecting()
    try:
        while True:
            started = monotonic()
            digest = fleet.digests.due(started, no_peers=not fleet.peers)
            try:
                if digest is not None:
                    refusal = await send_digest(redis, keys, digest)
                    took_s = monotonic() - started
                    metrics.redis_seconds.observe(took_s)
                    delays.redis_s.add(took_s)
                    if digest.kind is DigestKind.WHOLE:
                        delays.redis_refusal = refusal
                    backoff.reset()
                    outage.recovered()
            except (RedisError, OSError) as error:
                outage.failed(error)
                fleet.digests.repeat()
                await asyncio.sleep(backoff.next())
            await asyncio.sleep(max(EVERY_S - (monotonic() - started), 0.0))
    finally:
        with suppress(RedisError, OSError):
            await send_digest(redis, keys, fleet.digests.farewell())


async def _publish_admin(fleet: Fleet, admin: str) -> None:
    """Adds the address of the admin server to the router's digests."""
    fleet.digests.admin = await reachable(admin)


def _take(fleet: Fleet, metrics: RouterMetrics, event: DigestEvent) -> None:
    match event:
        case DigestReceived(digest, age):
            if digest.router != fleet.router and not age:
                metrics.digest_age.observe(max(wall() - digest.sent_at, 0.0))
            fleet.receive_digest(digest, age)
        case Connected():
            fleet.peers.connected()


async def _send_owners(redis: Redis, key: str, owners: OwnerMap) -> None:
    while True:
        batch = await owners.take_announcements(_OWNERS_AT_ONCE)
        entries = [Owner(thing, replica) for thing, replica in batch]
        await append(redis, key, OWNER, MAX_OWNERS, entries)


def _keep_owner(owners: OwnerMap, owner: Owner) -> None:
    owners.remember(owner.thing, owner.replica)


async def _send_prompts(redis: Redis, key: str, fleet: Fleet) -> None:
    while True:
        while prompts := fleet.prompt_log.take():
            await append(redis, key, PROMPTS, MAX_PROMPT_BATCHES, [Prompts(fleet.router, prompts)])
        await asyncio.sleep(EVERY_S if fleet.peers else _ALONE_S)


async def _receive_prompts(reader: StreamReader[Prompts], fleet: Fleet) -> None:
    """Receives prompts that other routers dispatched. Waits until all members are known, because
    prompts for unknown replicas would be lost."""
    await fleet.members_known.wait()
    await _receive(reader, lambda sent: fleet.receive_prompts(sent.router, sent.prompts))


async def _watch_pollers(redis: Redis, pool: str, fleet: Fleet, skips: Skips) -> None:
    while True:
        try:
            alive, fleet.stopped_pollers = await known_pollers(redis, pool, skips)
            fleet.pollers = {name: beat.problems for name, beat in alive.items()}
            fleet.listed({replica for beat in alive.values() for replica in beat.replicas})
        except (RedisError, OSError):
            fleet.pollers = None
        await asyncio.sleep(_POLLERS_EVERY_S)


async def _remember_models(redis: Redis, pool: str, fleet: Fleet) -> None:
    """Reads which models were served lately. Then stores the models that no replica serves any
    more, again and again, because Redis may be emptied."""
    members, recalled = fleet.members, False
    while True:
        epoch = wall() - monotonic()
        with suppress(RedisError, OSError):
            if not recalled:
                found = await read_departed(redis, pool)
                members.models_departed({model: at - epoch for model, at in found.items()})
                recalled = True
            if departed := members.departed_models:
                times = {model: at + epoch for model, at in departed.items()}
                await write_departed(redis, pool, times)
        await asyncio.sleep(_MODELS_EVERY_S)
