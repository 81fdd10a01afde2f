"""Turns of the routers at a replica for which several of them have requests queued."""

from collections.abc import Iterator

from extproc.fleet.fleet import Fleet
from extproc.ground.clock import Clock
from extproc.route.backlog import Backlog

_KEEPS = 1.3
"""A router leaves a place only if another router's quotient is so many times its own. With 1.0
routers leave places to each other more often: the p99 of simulated overloads of replicas with four
places rises by 5%."""
_LEFT_S = 0.15  # seconds in which a digest reaches another router, and that router sweeps its queue
_KEPT_S = 1.0  # seconds in which a replica that was left in vain is left to no router


class Turns:
    """Divides the places on a replica between the routers.

    If the router whose request has ended always took the place, a router with few queued requests
    could keep all places on a replica. So the place goes to the router with the largest quotient,
    as seats go to parties by D'Hondt's rule::

        replica-seconds queued for the replica ÷ (requests in flight there + 1)

    Only requests of the highest priority that any router has queued for the replica count. To leave
    the place to another router, a router sends no request of this or a lower priority to the
    replica for 0.15 s.
    """

    def __init__(self, fleet: Fleet, backlog: Backlog, clock: Clock) -> None:
        self._fleet = fleet
        self._backlog = backlog
        self._clock = clock
        self._until: dict[int, float] = {}  # row → until when the replica is left
        self._kept: dict[int, float] = {}  # row → until when the replica is left to no router

    def leave(self, replica: str) -> bool:
        """Leave a replica, on which a request has ended, to another router if it is that router's
        turn; return True if so."""
        row, now = self._fleet.members.rows.get(replica), self._clock()
        if row is None or self._kept.get(row, now) > now or (turn := self._others(row)) is None:
            return False
        self._until.setdefault(row, now + _LEFT_S)
        self._backlog.left[row] = turn
        return True

    def keep(self, row: int) -> None:
        """Leave a replica to no router for 1 s, because no router used the place there."""
        self._kept[row] = self._clock() + _KEPT_S

    def over(self) -> list[int]:
        """Return the rows of replicas that were left for 0.15 s; they are left no longer."""
        now = self._clock()
        rows = [row for row, until in self._until.items() if until <= now]
        for row in rows:
            del self._until[row], self._backlog.left[row]
        return rows

    def freed(self) -> Iterator[int]:
        """Yield the rows of replicas on which requests of other routers have ended, and where it is
        this router's turn."""
        for row in self._fleet.peers.take_freed():
            if self._backlog.work_at(row) and self._others(row) is None:
                yield row

    def _others(self, row: int) -> int | None:
        """Return the priority of the requests of another router whose turn it is; None: it is this
        router's turn."""
        replica, own = self._fleet.members.by_row[row].id, self._backlog.work_at(row)
        others = self._fleet.peers.queued_for(replica)
        priority = max((at for work, _ in others for at in work), default=None)
        if priority is None or any(at > priority for at in own):
            return None
        requests = self._fleet.in_flight_on(replica)
        quotient = _KEEPS * own.get(priority, 0.0) / (requests + 1)
        largest = max(work.get(priority, 0.0) / (on + 1.0) for work, on in others)
        return priority if largest > quotient else None
