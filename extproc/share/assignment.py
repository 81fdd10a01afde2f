"""Division of a pool's replicas among its pollers, by rendezvous hashing over their heartbeats.

Each poller tells the others which replicas it lists. A replica belongs to the poller with the
highest hash of both names, among the living ones that list it. So each replica that any poller
lists has one, and a poller that comes or goes moves no replicas but its own.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NoReturn

from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.utils import str_if_bytes

from extproc.ground.clock import Clock
from extproc.ground.outage_log import OutageLog
from extproc.share.connection import Keys, in_time
from extproc.share.envelope import EnvelopeKind, Skips

LIFE_S = 1.2
"""Seconds that a heartbeat counts. With ``BEAT_S`` and a scrape on top of it, the replicas of a
poller that died are taken over within two seconds."""
BEAT_S = 0.3  # seconds between two heartbeats


class Heartbeat(Struct, array_like=True, frozen=True):
    """A living poller."""

    replicas: tuple[str, ...]  # ip:port of all that it lists


HEARTBEAT = EnvelopeKind("heartbeat", Heartbeat)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The replicas that a poller is to scrape until its next heartbeat."""

    replicas: frozenset[str]
    listed_by_others: frozenset[str] = frozenset()
    paused: bool = False  # the poller did, and others may have scraped its replicas meanwhile
    redis_was_emptied: bool = False  # Redis came back empty


async def living(redis: Redis, pool: str) -> list[str]:
    """Returns the names of a pool's pollers that are alive."""
    keys = Keys(pool)
    async with in_time():
        found: Any = await redis.smembers(keys.pollers)
    names = sorted(map(str_if_bytes, found))
    async with in_time(), redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.exists(keys.poller + name)
        alive = await pipe.execute()
    return [name for name, is_alive in zip(names, alive, strict=True) if is_alive]


class Assigner:
    """The part of one poller, whose name is unlike any other's.

    - A newcomer leaves what others have for one heartbeat, in which they see it.
    - Without Redis the poller goes on with its part. A Redis that comes back empty is told of the
      other pollers within ``LIFE_S``; until then those known before count.
    """

    def __init__(
        self,
        redis: Redis,
        pool: str,
        poller: str,
        outage: OutageLog,
        clock: Clock,
        skips: Skips | None = None,
    ) -> None:
        self._redis = redis
        self._keys = Keys(pool)
        self._poller = poller
        self._key = self._keys.poller + poller
        self._outage = outage
        self._clock = clock
        self._skips = skips or Skips()
        self._others: dict[str, frozenset[str]] = {}  # what living pollers list
        self._others_until = clock()  # none of them counts as gone before
        self._part: frozenset[str] = frozenset()
        self._is_new = True
        self._awake_at = clock()  # last seen to run
        self._stood_still = False  # before that, and since the last heartbeat
        self.beat_at: float | None = None
        """When the last heartbeat ended, well or not, by the clock; None: none has yet."""

    @property
    def paused(self) -> bool:
        """True if others may have the part, since the process stood still after its last heartbeat,
        which was up to ``BEAT_S`` old by then; Redis may have been late, too."""
        return self._stood_still or self._clock() - self._awake_at > LIFE_S - 2 * BEAT_S

    async def watch(self) -> NoReturn:
        """Notices that the process stands still, until cancelled."""
        while True:
            self._stood_still = self.paused
            self._awake_at = self._clock()
            await asyncio.sleep(BEAT_S)

    async def beat(self, replicas: Collection[str]) -> Assignment:
        """Tells the others of this poller and its list, and returns its part."""
        redis_was_emptied = is_current = False
        began = self._clock()
        try:
            was_known, names = await self._tell(replicas)
            others = await self._read(names)
        except (RedisError, OSError) as error:
            self._outage.failed(error)
            self._is_new |= self.paused
            self._part &= {*replicas}
        else:
            now = self._clock()
            is_current = now - began <= LIFE_S - 2 * BEAT_S  # else read before a pause
            self._is_new |= self.paused
            redis_was_emptied = not (was_known or self._is_new)
            if redis_was_emptied:
                self._others_until = now + LIFE_S
            self._others = self._others | others if now < self._others_until else others
            self._part = frozenset(filter(self._owns, replicas))
            self._is_new = False
            if not self._part:  # else what is written soon says so
                self._outage.recovered()
        self.beat_at = self._clock()
        others_may_have_it = self.paused and bool(self._others)
        # Without a current answer a poller that was alone may not be alone any more.
        self._stood_still = self.paused and not self._others and not is_current
        self._awake_at = self.beat_at
        listed_by_others = frozenset().union(*self._others.values())
        return Assignment(self._part, listed_by_others, others_may_have_it, redis_was_emptied)

    async def release(self) -> None:
        try:
            async with in_time(), self._redis.pipeline(transaction=False) as pipe:
                pipe.delete(self._key)
                pipe.srem(self._keys.pollers, self._poller)
                await pipe.execute()
        except (RedisError, OSError) as error:
            self._outage.failed(error)

    def _owns(self, replica: str) -> bool:
        rivals = [name for name, listed in self._others.items() if replica in listed]
        if self._is_new:
            return not rivals
        mine = _weight(self._poller, replica)
        return all(mine > _weight(name, replica) for name in rivals)

    async def _tell(self, replicas: Collection[str]) -> tuple[bool, list[str]]:
        """Returns whether Redis knew of this poller, and the names of the others, some of them
        dead; a full Redis refuses newcomers alone."""
        life_ms = round(LIFE_S * 1000)
        heartbeat = HEARTBEAT.seal(Heartbeat(tuple(replicas)))
        async with in_time(), self._redis.pipeline(transaction=False) as pipe:
            pipe.pexpire(self._key, life_ms)
            pipe.set(self._key, heartbeat, px=life_ms)
            pipe.sadd(self._keys.pollers, self._poller)
            pipe.pexpire(self._keys.pollers, life_ms)
            pipe.smembers(self._keys.pollers)
            was_known, *refused, names = await pipe.execute(raise_on_error=False)
        for error in (was_known, names, *(() if was_known else refused)):
            if isinstance(error, RedisError):
                raise error
        return bool(was_known), sorted({*map(str_if_bytes, names)} - {self._poller})

    async def _read(self, names: Collection[str]) -> dict[str, frozenset[str]]:
        """Returns what those of these pollers list that are alive."""
        if not names:
            return {}
        keys = {name: self._keys.poller + name for name in names}
        async with in_time():
            values = await self._redis.mget([*keys.values()])
        told = dict(zip(names, values, strict=True))
        if dead := [name for name, value in told.items() if value is None]:
            async with in_time():
                await self._redis.srem(self._keys.pollers, *dead)
        beats = {
            name: self._skips.open(keys[name], told[name], HEARTBEAT)
            for name in names
            if told[name]
        }
        return {name: frozenset(beat.replicas) for name, beat in beats.items() if beat}


def _weight(poller: str, replica: str) -> bytes:
    return blake2b(f"{poller} {replica}".encode(), digest_size=8).digest()
