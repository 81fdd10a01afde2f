"""What commands asked of the pool's membership, as this poller knows it."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from redis.exceptions import RedisError, ResponseError

from extproc.config import ReplicaSource
from extproc.ground.clock import Clock
from extproc.share.desired import Desired, DesiredStore

_EVERY_S = 0.25
"""Seconds between two looks: that soon a command has its effect."""
_REMEMBERED_S = 3600.0
"""Seconds for which a command is remembered though it changes nothing: no source names its replica
any more, or not yet again."""


class Membership:
    """The replicas that were added, and those that are draining or removed, by command.

    It is read again and again instead of being pushed: on the channel of changes a poller would
    have to read every state that all of them write.
    """

    def __init__(self) -> None:
        self._desired: dict[str, Desired] = {}
        self._named: set[str] | None = None
        """What the sources name; None: nobody has looked yet."""
        self._idle_since: dict[str, float] = {}
        """From when on a command has changed nothing."""
        self._changed = asyncio.Event()

    @property
    def added(self) -> tuple[ReplicaSource, ...]:
        """Sources to poll beside those of the configuration."""
        desired = self._desired.values()
        return tuple(one.source for one in desired if one.source and one.wish != "remove")

    def removed_of(self, replicas: Iterable[str]) -> set[str]:
        """Which of these, ``ip:port``, are not to be polled; they are all that are named."""
        named = self._named = set(replicas)
        return {one for one in named if self._wish(one) == "remove"}

    def drains(self, replica: str) -> bool:
        """Whether nothing new is to be sent there."""
        return self._wish(replica) == "drain"

    def wake(self) -> None:
        """Something else changed: whoever waits is to look again."""
        self._changed.set()

    async def wait(self, seconds: float) -> None:
        """Returns at a change, or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def follow(self, store: DesiredStore, clock: Clock) -> None:
        """Follows what is in Redis until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.look(store, clock())

    async def look(self, store: DesiredStore, now: float) -> None:
        """Reads what is in Redis, where it answers, and fills one that came back empty again."""
        try:
            await self._sync(store, now)
        except ResponseError as error:  # no right to: the publisher may have all that it needs
            store.refused.failed(error)
        except (RedisError, OSError):  # the publisher says so
            pass
        else:
            store.refused.works()

    async def _sync(self, store: DesiredStore, now: float) -> None:
        there = await store.read()
        known = {**self._desired, **there}
        idle = {replica for replica, one in known.items() if self._changes_nothing(replica, one)}
        self._idle_since = {replica: self._idle_since.get(replica, now) for replica in idle}
        old = {one for one, since in self._idle_since.items() if now - since > _REMEMBERED_S}
        if old & there.keys():
            await store.forget(old & there.keys())
        # What changes nothing is not restored: another poller, which found so first, forgot it.
        lost = known.keys() - there.keys() - idle
        if lost:
            await store.write({replica: known[replica] for replica in lost}, only_new=True)
        desired = {replica: one for replica, one in known.items() if replica not in old}
        if desired != self._desired:
            self._desired = desired
            self._changed.set()

    def _changes_nothing(self, replica: str, desired: Desired) -> bool:
        if self._named is None or (desired.source and desired.wish != "remove"):
            return False
        return desired.wish == "serve" or replica not in self._named

    def _wish(self, replica: str) -> str:
        desired = self._desired.get(replica)
        return "serve" if desired is None else desired.wish
