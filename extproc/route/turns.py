"""Turns of the routers at the places of a replica for which requests are queued."""

from collections.abc import Mapping

from extproc.fleet.fleet import Fleet
from extproc.route.backlog import Backlog

_FACTOR = 1.5
"""Factor by which the quotient of another router has to exceed the router's own. With 1.0 routers
leave places to each other more often: the p99 of simulated overloads of replicas with four places
rises by 5%."""
_LEFT_S = 0.1  # seconds in which a digest reaches another router, and that router sweeps its queue
_FREED = 8  # limit of the replicas that a sweep offers because other routers' requests have ended


class Turns:
    """Divides the places on a replica between the routers.

    If the router whose request has ended always took the place, a router with few queued requests
    could keep all places on a replica. So this router leaves the place to another router whose
    quotient is more than 1.5 times its own. D'Hondt's rule gives seats to parties in this way::

        replica-seconds queued for the replica ÷ (requests in flight there + 1)

    Only requests of the highest priority that any router has queued for the replica count. While a
    router leaves a replica, it sends no request of this highest priority or below there.
    """

    def __init__(self, fleet: Fleet, backlog: Backlog) -> None:
        self._fleet = fleet
        self._backlog = backlog
        self._until: dict[int, float] = {}  # row → until when the replica is left

    def leave(self, replica: str) -> None:
        """If it is another router's turn at a replica on which a request of this router has ended,
        leave the replica to that router until 0.1 s after the first such end."""
        row = self._fleet.members.rows.get(replica)
        if row is None or not self._fleet.peers:
            return
        [own] = self._backlog.work_at([row])
        if (priority := self._others(row, own)) is not None:
            self._until.setdefault(row, self._fleet.now + _LEFT_S)
            self._backlog.left[row] = priority

    def over(self) -> list[int]:
        """Return the rows of replicas that were left for 0.1 s; they are left no longer."""
        now = self._fleet.now
        rows = [row for row, until in self._until.items() if until <= now]
        for row in rows:
            del self._until[row], self._backlog.left[row]
        return rows

    def freed(self) -> list[int]:
        """Return the rows of at most eight replicas on which requests of other routers have ended,
        if requests are queued here for the replica and it is no other router's turn."""
        rows = [*self._fleet.peers.take_freed(_FREED)]
        works = zip(rows, self._backlog.work_at(rows), strict=True)
        return [row for row, own in works if own and self._others(row, own) is None]

    def _others(self, row: int, own: Mapping[int, float]) -> int | None:
        """Return the priority of the work for which it is another router's turn; None: it is no
        other router's turn. ``own``: this router's work for the replica, by priority."""
        replica = self._fleet.members.by_row[row].id
        others = self._fleet.peers.queued_for(replica)
        priority = max((at for work, _ in others for at in work), default=None)
        if priority is None or any(at > priority for at in own):
            return None
        requests = self._fleet.in_flight_on(replica)
        quotient = _FACTOR * own.get(priority, 0.0) / (requests + 1)
        largest = max(work.get(priority, 0.0) / (on + 1.0) for work, on in others)
        return priority if largest > quotient else None
