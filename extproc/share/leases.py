"""Which poller scrapes which replica: a lease on each, in Redis."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.utils import str_if_bytes

from extproc.ground.clock import Clock
from extproc.ground.outage_log import OutageLog
from extproc.share.connection import Keys, in_time

LIFE_S = 1.2
"""Seconds a lease lives without being renewed. With ``TEND_S`` and a scrape on top of it, the
replicas of a poller that died are taken over within two seconds."""
TEND_S = 0.3  # seconds between two rounds of renewing and taking

_RENEWED, _RECLAIMED, _TAKEN = 1, 2, 3  # and 0: another's, or nobody's

# KEYS: the pollers, then leases, those held first. ARGV: who asks, life in ms, how many leases it
# held, whether it was here before, whether it may take. What it held and nobody has now is its own
# again. It takes what nobody holds, or one who holds more than a fair share, up to a fair share: so
# nothing is ever given up before somebody has it, and a balance once reached stays. A poller that
# was forgotten takes nothing: Redis may be empty, and the others are yet to claim what they held.
# A full Redis refuses what is new, and still renews.
_TEND = """
local me, life, held = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local forgotten = redis.pcall('ZADD', KEYS[1], now + life, me) == 1 and ARGV[4] == '1'
local takes = ARGV[5] == '1' and not forgotten
redis.call('PEXPIRE', KEYS[1], life)
local share = math.ceil((#KEYS - 1) / math.max(redis.call('ZCARD', KEYS[1]), 1))
local owners, holds, answers = {}, {[me] = 0}, {}
local function hold(i, answer)
  if owners[i] == me then
    redis.call('PEXPIRE', KEYS[i], life)
  elseif redis.pcall('SET', KEYS[i], me, 'PX', life).err then
    return
  end
  answers[i - 1] = answer
  holds[me] = holds[me] + 1
end
for i = 2, #KEYS do
  local owner = redis.call('GET', KEYS[i])
  owners[i], answers[i - 1] = owner, 0
  if owner == me then
    hold(i, 1)
  elseif owner then
    holds[owner] = (holds[owner] or 0) + 1
  elseif i - 1 <= held then
    hold(i, 2)
  end
end
for i = 2, #KEYS do
  if not takes or holds[me] >= share then break end
  local owner = owners[i]
  if answers[i - 1] == 0 and (not owner or holds[owner] > share) then
    if owner then holds[owner] = holds[owner] - 1 end
    hold(i, 3)
  end
end
return {forgotten and 1 or 0, answers}
"""

_RELEASE = """
redis.call('ZREM', KEYS[1], ARGV[1])
for i = 2, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then redis.call('DEL', KEYS[i]) end
end
"""


@dataclass(frozen=True, slots=True)
class Held:
    """The replicas a poller is to scrape."""

    replicas: frozenset[str]
    taken: frozenset[str] = frozenset()
    """Those of them that it did not hold before, or lost in the meantime."""
    reclaimed: frozenset[str] = frozenset()
    """Those that it held and that nobody had any more: Redis came back empty."""


async def living(redis: Redis, pool: str) -> list[str]:
    """Names of the pollers of a pool that are alive; those that ended last are among them for the
    life of a lease."""
    async with in_time():
        names = cast(list[bytes], await redis.zrange(Keys(pool).pollers, 0, -1))
    return [*map(str_if_bytes, names)]


class Leases:
    """A poller's leases on its part of a pool's replicas; its name is unlike any other's.

    Without Redis it goes on with what it holds. When Redis is back, perhaps empty, each poller
    first claims what it held, for the life of a lease; only then is the rest divided. The same when
    the poller itself was away for longer than the life of a lease.
    """

    def __init__(
        self, redis: Redis, pool: str, poller: str, outage: OutageLog, clock: Clock
    ) -> None:
        self._redis = redis
        self._keys = Keys(pool)
        self._poller = poller
        self._outage = outage
        self._clock = clock
        self._held: frozenset[str] = frozenset()
        self._introduced = False
        self._takes_from = clock()
        self.tended_at: float | None = None
        """When the last round ended, by the clock; None: none has yet."""

    async def tend(self, replicas: Collection[str]) -> Held:
        """Renew the leases on these replicas, all of the pool, and take a fair share, in one round
        trip."""
        mine = [replica for replica in replicas if replica in self._held]
        asked = mine + [replica for replica in replicas if replica not in self._held]
        try:
            answers = await self._ask(asked, len(mine))
        except (RedisError, OSError) as error:
            self._outage.failed(error)
            self._held = frozenset(mine)
            return Held(self._held)
        finally:
            self.tended_at = self._clock()
        renewed, reclaimed, taken = (
            frozenset(one for one, answer in zip(asked, answers, strict=True) if answer == wanted)
            for wanted in (_RENEWED, _RECLAIMED, _TAKEN)
        )
        self._held = renewed | reclaimed | taken
        if not self._held:  # else what is written soon says so
            self._outage.works()
        return Held(self._held, taken, reclaimed)

    async def release(self) -> None:
        """Give up everything, for others to take at once; without Redis it expires by itself."""
        keys = self._keys_of(self._held)
        self._held = frozenset()
        try:
            async with in_time():
                await self._redis.eval(_RELEASE, len(keys), *keys, self._poller)
        except (RedisError, OSError) as error:
            self._outage.failed(error)

    async def _ask(self, replicas: Collection[str], held: int) -> list[int]:
        keys = self._keys_of(replicas)
        flags = int(self._introduced), int(self._clock() >= self._takes_from)
        async with in_time():
            forgotten, answers = await self._redis.eval(
                _TEND, len(keys), *keys, self._poller, round(LIFE_S * 1000), held, *flags
            )
        self._introduced = True
        if forgotten:
            self._takes_from = self._clock() + LIFE_S
        return list(answers)

    def _keys_of(self, replicas: Collection[str]) -> list[str]:
        return [self._keys.pollers, *(self._keys.lease + replica for replica in replicas)]
