"""Log lines about changes of replicas, processes, counters and warnings, found once a second."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, field

from extproc.fleet.exclusion_reasons import DRAINING, FAILING, FULL
from extproc.fleet.fleet import Fleet
from extproc.ground.address import process_address
from extproc.ground.clock import Clock, time_of_day
from extproc.observe.metrics import Counts

logger = logging.getLogger(__name__)

_NOT_LOGGED = FAILING.name, FULL.name
"""Ejections have a log line of their own, and a full replica may change every second."""
_GONE_S = 600.0  # time for which a process that left stays on the page
_COUNTED_EVERY_S = 60.0  # between two lines of a counter, which may grow 100 times a second
_OVER_S = 60.0  # time without a warning until its end is logged: a figure may vary around a limit


def since_when(first: float, replicas: Collection[str]) -> str:
    """Format the time since which the first of some replicas has a fault: ``since 12:03:04``."""
    return f"{'the first ' if len(replicas) > 1 else ''}since {time_of_day(first)}"


@dataclass(eq=False)
class Exclusions:
    """Excluded replicas of a pool, each since the ``look`` call that first found it excluded."""

    # Last reason, and start of the exclusion.
    _excluded: dict[str, tuple[str, float]] = field(default_factory=dict, init=False)

    def look(self, fleet: Fleet, now: float) -> dict[str, str]:
        """Logs exclusions that began, ended or changed their reason since the last call.

        Returns the reason of each excluded replica. ``now``: seconds since the epoch.
        """
        reasons = {replica: name for replica, (name, _) in fleet.eligibility.exclusions().items()}
        for replica in self._excluded.keys() - reasons.keys():
            reason, since = self._excluded.pop(replica)
            if replica in fleet.members and reason not in _NOT_LOGGED:
                title = fleet.members.title(replica)
                text = f"replica {title} is used again after {now - since:.0f} s"
                logger.info(text, extra={"reason": reason})
        for replica, reason in reasons.items():
            before, since = self._excluded.get(replica, ("", now))
            self._excluded[replica] = reason, since
            if before == reason:
                continue
            title, state = fleet.members.title(replica), fleet.members.get(replica)
            extra = {"problem": state.problem} if state and state.problem else {}
            if reason == DRAINING.name:
                logger.info(f"replica {title} excluded: draining")
            elif reason not in _NOT_LOGGED:
                logger.warning(f"replica {title} excluded: {reason}", extra=extra)
        return reasons

    def since(self, replicas: Collection[str]) -> str:
        """Text that says since when the replicas are excluded; empty if unknown."""
        times = [self._excluded[replica][1] for replica in replicas if replica in self._excluded]
        return since_when(min(times), replicas) if times else ""


@dataclass(eq=False)
class Onsets:
    """Times since which replicas cause the dashboard's warnings, in seconds since the epoch.

    A figure may vary around its limit, so a cause that returns within a minute counts as the same
    cause.
    """

    _wall: Clock
    # First and last time.
    _seen: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict, init=False)

    def since(self, cause: str, replicas: Collection[str]) -> str:
        """Notes that replicas cause a warning now, and formats since when the first has done so.

        Args:
            cause: name of the cause, such as ``slow``.
            replicas: at least one ``ip:port``.
        """
        now, keys = self._wall(), [(cause, replica) for replica in replicas]
        seen = {key: times for key, times in self._seen.items() if now - times[1] <= _OVER_S}
        self._seen = seen | {key: (seen.get(key, (now, now))[0], now) for key in keys}
        return since_when(min(self._seen[key][0] for key in keys), replicas)


@dataclass(eq=False)
class Presence:
    """Living and gone processes of one kind. A process counts as gone from the first ``look`` call
    whose ``alive`` does not name it."""

    kind: str  # routers or pollers
    _pool: str  # for the log
    _alive: frozenset[str] | None = field(default=None, init=False)  # None: not known yet
    # Time of leaving, in seconds since the epoch; True: the process did not announce its stop.
    _gone: dict[str, tuple[float, bool]] = field(default_factory=dict, init=False)
    _farewells: frozenset[str] = field(default=frozenset(), init=False)  # last ``stopped``

    def look(self, alive: Collection[str], now: float, stopped: Collection[str]) -> None:
        """Compares with the last look, and logs changes.

        Args:
            alive: host and port of the living processes.
            now: seconds since the epoch.
            stopped: names of processes that announced their stop recently; a process that starts
                again has a new name.
        """
        now_alive = frozenset(alive)
        before = now_alive if self._alive is None else self._alive
        joined, left, self._alive = now_alive - before, before - now_alive, now_alive
        if joined or left:
            names = {"joined": ", ".join(sorted(joined)), "left": ", ".join(sorted(left))}
            logger.info(f"{self.kind} joined or left the pool", extra={"pool": self._pool} | names)
        said_farewell = {process_address(name) for name in stopped if name not in self._farewells}
        self._farewells = frozenset(stopped)
        self._gone = {
            name: (since, silent and name not in said_farewell)
            for name, (since, silent) in (self._gone | dict.fromkeys(left, (now, True))).items()
            if name not in now_alive and now - since < _GONE_S
        }

    @property
    def gone(self) -> str:
        """Processes that left in the last ten minutes, each with the time of day when it left."""
        return ", ".join(map(self._since, self._gone))

    @property
    def lost(self) -> list[str]:
        """Processes of :attr:`gone` that did not announce their stop, each with the time of day."""
        return [self._since(name) for name, (_, silent) in self._gone.items() if silent]

    def _since(self, name: str) -> str:
        return f"{name} (since {time_of_day(self._gone[name][0])})"


@dataclass(eq=False)
class CounterLog:
    """Warns when a counter grows: at once, then every minute with the count since the last line."""

    _log: logging.Logger
    _event: str  # message of each line
    _counts: Counts  # a counter with one label, which names the reason or the replica
    _clock: Clock
    _expected: Container[str]  # reasons that are not logged
    _title: Callable[[str], str] = str  # label for people
    _logged: Counter[str] = field(default_factory=Counter, init=False)
    _next: float = field(default=0.0, init=False)  # earliest time of the next line, on the clock

    def look(self) -> None:
        now = self._clock()
        if now < self._next:
            return
        counted = Counter({reason: int(count) for (reason,), count in self._counts.items()})
        grown = {
            self._title(reason): count
            for reason, count in (counted - self._logged).items()
            if reason not in self._expected
        }
        if grown:
            self._log.warning(self._event, extra=grown)
            self._next = now + _COUNTED_EVERY_S
        self._logged = counted


@dataclass(eq=False)
class WarningLog:
    """Logs a warning of the dashboard when it appears, and again when it is over."""

    _clock: Clock
    # Warning → last time shown, on the clock.
    _seen: dict[str, float] = field(default_factory=dict, init=False)

    def look(self, warnings: Iterable[str]) -> None:
        """Logs which warnings appeared or ended; ``warnings``: all that the dashboard shows now."""
        now = self._clock()
        for warning in warnings:
            if warning not in self._seen:
                logger.warning(f"dashboard warning: {warning}")
            self._seen[warning] = now
        for warning in [text for text, at in self._seen.items() if now - at > _OVER_S]:
            del self._seen[warning]
            logger.info(f"dashboard warning ended: {warning}")
