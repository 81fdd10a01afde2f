"""Assignment of a pool's replicas to its pollers, by rendezvous hashing.

The heartbeat of a poller lists the replicas that the poller's sources name. Of the living pollers
that list a replica, the poller with the highest hash of (poller, replica) gets the replica. So if a
poller starts or stops, only its own replicas move.
"""

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.utils import str_if_bytes

from extproc.ground.address import process_address
from extproc.ground.clock import Clock
from extproc.share.connection import Keys, in_time, outage
from extproc.share.envelope import EnvelopeKind, Skips

LIFE_S = 1.2  # life of a heartbeat: others take over a dead poller's replicas within 2 s
BEAT_S = 0.3  # between two heartbeats
_FAREWELL_S = 5.0  # life of a farewell; routers look for farewells once a second


class Heartbeat(Struct, array_like=True, frozen=True):
    """Sign of life of a poller, or its farewell when it shuts down."""

    replicas: tuple[str, ...]  # ip:port of the replicas that the poller's sources name
    problems: tuple[str, ...] = ()  # sources of replicas that cannot be read, with the reasons
    stopped: bool = False


HEARTBEAT = EnvelopeKind("heartbeat", Heartbeat)
_UNREADABLE = Heartbeat((), ("any source: its heartbeat cannot be read",))


@dataclass(frozen=True, slots=True)
class Assignment:
    """Replicas that this poller scrapes until its next heartbeat."""

    replicas: frozenset[str]
    listed_by_others: frozenset[str] = frozenset()
    lapsed: bool = False  # the heartbeat had expired: others may have scraped the replicas
    redis_was_emptied: bool = False


async def known_pollers(
    redis: Redis, pool: str, skips: Skips
) -> tuple[dict[str, Heartbeat], set[str]]:
    """Returns the heartbeats of a pool's living pollers, by ``host:port``, and the names of the
    pollers that shut down within the last 5 s. An unreadable heartbeat counts as a problem."""
    keys = Keys(pool)
    found: Any = await in_time(redis.smembers(keys.pollers))
    names = sorted(map(str_if_bytes, found))
    beats = await _heartbeats(redis, keys, names, skips)
    stopped = {name for name, beat in beats.items() if beat and beat.stopped}
    alive = {name: beat or _UNREADABLE for name, beat in beats.items() if name not in stopped}
    return {process_address(name): beat for name, beat in alive.items()}, stopped


async def _heartbeats(
    redis: Redis, keys: Keys, names: Collection[str], skips: Skips
) -> dict[str, Heartbeat | None]:
    """Returns the named pollers' heartbeats in Redis, with None for an unreadable heartbeat."""
    if not names:  # Redis refuses to read no keys
        return {}
    by_key = {keys.poller + name: name for name in names}
    values = await in_time(redis.mget([*by_key]))
    found = zip(by_key.items(), values, strict=True)
    return {name: skips.open(key, value, HEARTBEAT) for (key, name), value in found if value}


class Assigner:
    """Assigns replicas to one poller, whose name is unique.

    - A new poller, or one whose heartbeat has expired, takes no replica that other pollers list
      until its second heartbeat: the first one only announces the poller.
    - While Redis is away, the poller keeps its replicas. If Redis comes back empty, the pollers
      known before the outage count as living for ``LIFE_S``, to have time for new heartbeats.
    """

    def __init__(
        self, redis: Redis, pool: str, poller: str, clock: Clock, skips: Skips | None = None
    ) -> None:
        self._redis = redis
        self._keys = Keys(pool)
        self._poller = poller
        self._key = self._keys.poller + poller
        self.outage = outage(redis)
        self._clock = clock
        self._skips = skips or Skips()
        self._others: dict[str, frozenset[str]] = {}  # other living poller → replicas on its list
        self._others_until = clock()  # until this time all known pollers count as living
        self._replicas: frozenset[str] = frozenset()
        self._lives_until = -inf  # expiry of the last heartbeat, written or only attempted
        self.beat_at: float | None = None  # when the last attempt to write a heartbeat ended

    @property
    def lapsed(self) -> bool:
        """True if no heartbeat is alive: the poller is new, or stood still, or was slow.

        Other pollers may have taken over the replicas, so this poller must write no states until
        its next heartbeat tells which replicas it still has.
        """
        return self._clock() > self._lives_until

    async def beat(self, replicas: Collection[str], problems: Collection[str] = ()) -> Assignment:
        """Writes a heartbeat with these replicas and problems, and returns the assignment."""
        began, began_lapsed = self._clock(), self.lapsed
        lapsed = redis_was_emptied = False
        try:
            was_known, others = await self._exchange(Heartbeat((*replicas,), (*problems,)))
        except (RedisError, OSError) as error:
            self.outage.failed(error)
            ended = self._clock()
            if not began_lapsed and ended <= began + LIFE_S:  # else the process stood still
                self._lives_until = ended + LIFE_S
            self._replicas &= {*replicas}
        else:
            now = self._clock()
            lapsed = not was_known and now > self._lives_until
            redis_was_emptied = not (was_known or lapsed)
            if redis_was_emptied:
                self._others_until = now + LIFE_S
            self._others = self._others | others if now < self._others_until else others
            self._replicas = frozenset(each for each in replicas if self._owns(each, lapsed))
            self._lives_until = began + LIFE_S
            if not self._replicas:  # with replicas, the next write of states ends the outage
                self.outage.recovered()
        self.beat_at = self._clock()
        listed_by_others = frozenset().union(*self._others.values())
        lapsed &= bool(self._others)  # without other pollers, nobody took the replicas
        return Assignment(self._replicas, listed_by_others, lapsed, redis_was_emptied)

    async def release(self) -> None:
        """Writes a farewell, so that other pollers take over the replicas at once."""
        farewell, life_ms = Heartbeat((), stopped=True), round(_FAREWELL_S * 1000)
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.delete(self._key)  # a full Redis deletes the heartbeat, but stores no farewell
                pipe.set(self._key, HEARTBEAT.seal(farewell), px=life_ms)
                pipe.pexpire(self._keys.pollers, life_ms)
                await in_time(pipe.execute())
        except (RedisError, OSError) as error:
            self.outage.failed(error)

    def _owns(self, replica: str, is_new: bool) -> bool:
        rivals = [name for name, listed in self._others.items() if replica in listed]
        if is_new:
            return not rivals
        mine = _weight(self._poller, replica)
        return all(mine > _weight(name, replica) for name in rivals)

    async def _exchange(self, heartbeat: Heartbeat) -> tuple[bool, dict[str, frozenset[str]]]:
        """Writes the heartbeat. Returns two results: True if Redis still had the last heartbeat;
        and the replicas that each other living poller lists.

        A full Redis refuses a new poller, but prolongs the last heartbeat of a known poller.
        """
        life_ms = round(LIFE_S * 1000)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.pexpire(self._key, life_ms)
            pipe.set(self._key, HEARTBEAT.seal(heartbeat), px=life_ms)
            pipe.sadd(self._keys.pollers, self._poller)
            pipe.pexpire(self._keys.pollers, life_ms)
            pipe.smembers(self._keys.pollers)
            was_known, *refused, found = await in_time(pipe.execute(raise_on_error=False))
        for error in (was_known, found, *(() if was_known else refused)):
            if isinstance(error, RedisError):
                raise error
        names = {*map(str_if_bytes, found)} - {self._poller}
        beats = await _heartbeats(self._redis, self._keys, names, self._skips)
        if dead := names - beats.keys():
            await in_time(self._redis.srem(self._keys.pollers, *dead))
        alive = {name: beat for name, beat in beats.items() if beat and not beat.stopped}
        return bool(was_known), {name: frozenset(beat.replicas) for name, beat in alive.items()}


def _weight(poller: str, replica: str) -> bytes:
    return blake2b(f"{poller} {replica}".encode(), digest_size=8).digest()
