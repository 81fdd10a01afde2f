"""What commands asked of the pool's membership, as this poller knows it."""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from redis.exceptions import RedisError, ResponseError

from extproc.clock import Clock
from extproc.config import ReplicaSource
from extproc.replica_state import ReplicaState
from extproc.store.members import Member, Members, MemberStore

log = logging.getLogger(__name__)

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
        self._members: dict[str, Member] = {}
        self._named: set[str] | None = None
        """What the sources name; None: nobody has looked yet."""
        self._obsolete_since: dict[str, float] = {}
        """From when on a command has changed nothing."""
        self._changed = asyncio.Event()
        self._refused = False

    @property
    def added(self) -> tuple[ReplicaSource, ...]:
        """Sources to poll beside those of the configuration."""
        members = self._members.values()
        return tuple(one.source for one in members if one.source and one.wish != "remove")

    def removed_of(self, replicas: Iterable[str]) -> set[str]:
        """Which of these, ``ip:port``, are not to be polled; they are all that are named."""
        named = self._named = set(replicas)
        return {one for one in named if self._wish(one) == "remove"}

    def marked(self, state: ReplicaState) -> ReplicaState:
        """The state as it is to be published: it says whether the replica is draining."""
        draining = self._wish(state.id) == "drain"
        return state.model_copy(update={"draining": True}) if draining else state

    async def wait(self, seconds: float) -> None:
        """Returns at a change, or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def follow(self, store: MemberStore, clock: Clock) -> None:
        """Follows what is in Redis until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.look(store, clock())

    async def look(self, store: MemberStore, now: float) -> None:
        """Reads what is in Redis, where it answers, and fills one that came back empty again."""
        try:
            await self._sync(store, now)
        except ResponseError as error:  # no right to: the publisher may have all that it needs
            self._note(store.key, str(error))
        except (RedisError, OSError):  # the publisher says so
            pass
        else:
            self._note(store.key, "")

    def _note(self, key: str, refused: str) -> None:
        """One line when Redis begins to refuse, and one when it no longer does."""
        if refused and not self._refused:
            extra = {"key": key, "error": refused, "allow": f"~{key} +@read +@write"}
            log.error("redis refuses a key: 'extproc replicas' has no effect", extra=extra)
        elif self._refused and not refused:
            log.warning("redis refuses the key no longer", extra={"key": key})
        self._refused = bool(refused)

    async def _sync(self, store: MemberStore, now: float) -> None:
        members = await store.read()
        known = {**self._members, **members}
        old = self._over(known, now)
        # What changes nothing is not restored: another poller, which found so first, forgot it.
        lost = {
            key: known[key] for key in known.keys() - members.keys() - self._obsolete_since.keys()
        }
        if old & members.keys():
            await store.forget(old & members.keys())
        if lost:
            await store.restore(lost)
        self._take({key: member for key, member in known.items() if key not in old})

    def _take(self, members: Members) -> None:
        if members != self._members:
            self._members = dict(members)
            self._changed.set()

    def _over(self, members: Members, now: float) -> set[str]:
        """Which have changed nothing for long."""
        obsolete = {key for key, member in members.items() if self._is_obsolete(key, member)}
        self._obsolete_since = {key: self._obsolete_since.get(key, now) for key in obsolete}
        return {key for key, since in self._obsolete_since.items() if now - since > _REMEMBERED_S}

    def _is_obsolete(self, key: str, member: Member) -> bool:
        if self._named is None or (member.source and member.wish != "remove"):
            return False
        return member.wish == "serve" or key not in self._named

    def _wish(self, replica: str) -> str:
        member = self._members.get(replica)
        return "serve" if member is None else member.wish
