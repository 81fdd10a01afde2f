"""Requests queued at this router, by model and by replica, and the replicas that they reserve."""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from extproc.predict.inputs import FleetView, Floats
from extproc.route.order import Line, Ranked, Shares
from extproc.route.waiting import OVERTAKEN_S, Key, Place, Waiting

_RUNS_BEFORE = 0.3
"""Fraction of the queued work ahead that counts as delay on a replica whose batch has free places:
the request may start before larger requests that wait for KV space. If the batch is full, all of
the work counts. With 1.0 in both cases requests wait too seldom for the replica that suits them:
the mean completion of simulated overload (azure-2023-conv ×2.4, seconds 500 to 1,000) rises by a
tenth."""

LEAD_S = 1.0
"""Replica-seconds by which a tenant may be ahead of another tenant, for each replica that can serve
the other's first request. Without the limit, small requests of one tenant fill all room, and large
requests of the other find none: in simulated overload (azure-2023-conv ×13, eight replicas) one of
two tenants got 80 replica-seconds more within half a minute."""

Lines = dict[tuple[str, bool], Line]  # by model, and whether requests wait for one replica alone


class Backlog:
    """Lines of queued requests: for each model, and for each replica and model. Requests that wait
    for one replica alone have lines of their own, because they reserve no other replica."""

    def __init__(self, now: float) -> None:
        self._tenants: dict[Key, dict[Waiting, None]] = {}  # the oldest request first
        self.shares = Shares(now, self._tenants)
        self._models: Lines = {}
        self._replicas: dict[int, Lines] = {}  # by row
        self._load: dict[int, Floats] = {}
        """By priority: requests that wait for each replica, and their replica-seconds. A column is
        a row of the fleet's table; the last column is zero and stands for all rows that follow."""
        self._seconds: dict[int, dict[str, float]] = {}  # replica-seconds, by priority and tenant
        self._victims = Ranked[Key]()  # lowest priority first, then most requests
        self.left: dict[int, int] = {}
        """Row of each replica that is left to another router (:mod:`extproc.route.turns`) → highest
        priority that may not start there."""

    def __bool__(self) -> bool:
        return bool(self._models or self.left)

    def enter(self, request: Waiting) -> None:
        self.shares.enter(request.key)
        self._tenants.setdefault(request.key, {})[request] = None
        self._seconds.setdefault(request.priority, {}).setdefault(request.tenant, 0.0)
        self._rank(request)
        self.await_replica(request)

    def leave(self, request: Waiting) -> None:
        self.await_no_more(request)
        del self._tenants[request.key][request]
        self._rank(request)

    def _rank(self, request: Waiting) -> None:
        if size := len(self._tenants[request.key]):
            self._victims.put(request.key, request.priority, -size, request.tenant)
        else:
            del self._tenants[request.key], self._seconds[request.priority][request.tenant]
            self._victims.drop(request.key)

    def victim(self) -> Waiting:
        """Request to refuse when the queue is full: at the lowest priority, the newest request of
        the tenant with the most queued requests."""
        _, tenant = self._victims.first()
        return next(reversed(self._tenants[tenant]))

    def await_replica(self, request: Waiting) -> None:
        """Put a request into the line of its model, and into that of the replica it waits for."""
        self._add(request, self._models)
        if request.row is not None:
            self._count(request, request.row, 1.0)
            self._add(request, self._replicas.setdefault(request.row, {}))

    def await_no_more(self, request: Waiting) -> None:
        """Take a request out of the lines in which :meth:`await_replica` put it."""
        _remove(request, self._models)
        if request.row is None:
            return
        self._count(request, request.row, -1.0)
        _remove(request, self._replicas[request.row])
        if not self._replicas[request.row]:
            del self._replicas[request.row]
        if not self._replicas:
            self._load.clear()

    def _count(self, request: Waiting, row: int, sign: float) -> None:
        load = self._load.setdefault(request.priority, np.zeros((2, 1)))
        if row + 1 >= load.shape[1]:
            load = self._load[request.priority] = np.hstack([load, np.zeros((2, row + 1))])
        load[:, row] += sign, sign * request.cost
        self._seconds[request.priority][request.tenant] += sign * request.cost

    def _add(self, request: Waiting, lines: Lines) -> None:
        lines.setdefault(request.line, Line(self.shares)).enter(request)

    def is_first(self, request: Waiting) -> bool:
        return self._models[request.line].head() is request

    def firsts(self, models: int) -> list[Waiting]:
        """Return the first request of each line of a model, for at most ``models`` lines; the next
        call continues with the next lines."""
        found = []
        for model in list(self._models)[:models]:
            line = self._models[model] = self._models.pop(model)
            found.append(line.head())
        return found

    def heads(self, row: int, models: int, most: int) -> list[Waiting]:
        """Return the first ``most`` requests that may start on a replica, by priority.

        At each priority the heads of the replica's lines come first. Then come the first requests
        of at most ``models`` lines of models (:meth:`firsts`) that may use the replica.
        """
        own = dict.fromkeys(line.head() for line in self._replicas.get(row, {}).values())
        others = [head for head in self.firsts(models) if row in head.usable]

        def rank(head: Waiting) -> tuple[float, ...]:
            return -head.priority, head not in own, self.shares.tag(head.key), head.due

        return sorted(own | dict.fromkeys(others), key=rank)[:most]

    def work(self) -> dict[str, dict[int, float]]:
        """Replica-seconds of the requests that wait for each replica, by priority."""
        names = [next(iter(lines.values())).head().replica for lines in self._replicas.values()]
        return dict(zip(names, self.work_at([*self._replicas]), strict=True))

    def work_at(self, rows: Sequence[int]) -> list[dict[int, float]]:
        """Replica-seconds of the requests that wait for the replica in each row, by priority."""
        found = [dict[int, float]() for _ in rows]
        for priority, load in self._load.items():
            columns = load.take(rows, axis=1, mode="clip").T.tolist()
            for work, (number, seconds) in zip(found, columns, strict=True):
                if number:
                    work[priority] = seconds
        return found

    def ahead(
        self, view: FleetView, place: Place, elsewhere: Callable[[int, float], float]
    ) -> tuple[Floats, Floats]:
        """Return the queued load that a request with this place would meet at each candidate.

        The first array counts the requests of the same or a higher priority that wait for the
        candidate. The second has the seconds of delay by those of them that go before the place.
        Requests of higher priority go first. At the same priority T tenants take turns: if a tenant
        has w seconds of work queued, at most T·w seconds of work go before its last request.

        The routers take turns, too: the queue of another router counts like the queue here, if it
        has as much work of a priority, and otherwise in proportion. ``elsewhere`` returns the work
        of that priority at all other routers, at each of them at most the given work.
        """
        requests, seconds = np.zeros((2, len(view)))
        for priority, load in self._load.items():
            if priority >= place.priority and load[0].any():
                number, work = load.take(view.rows, axis=1, mode="clip")
                here = float(load[1].sum())
                scale = 1.0 + elsewhere(priority, here) / here if here > 0.0 else 1.0
                requests += scale * number
                seconds += scale * self._share(priority, here, place) * work
        free = view.max_num_seqs - view.batch - view.waiting
        return requests, np.maximum(seconds, 0.0) * np.where(free > 0.0, _RUNS_BEFORE, 1.0)

    def _share(self, priority: int, total: float, place: Place) -> float:
        """Share, 0…1, of the queued work of ``priority`` that goes before the place.

        ``total``: replica-seconds queued with this priority at this router.
        """
        if priority > place.priority or total <= 0.0:
            return 1.0
        line, tenants = self._models.get(place.line), self._seconds.get(priority, {})
        turns = len(tenants) * tenants.get(place.tenant, 0.0)
        return (line.depth(place) if line else 1.0) * min(turns / total, 1.0)

    def reserves(self, row: int, place: Place) -> bool:
        """Return True if a replica is left to another router, or reserved for a queued request that
        goes before the place.

        The head of a line reserves the line's replica against later requests for its model, and
        against all lower priorities. A request of the same priority for another model is kept out
        only if two conditions hold: its tenant received no less than the head's tenant, and the
        request arrived more than ``OVERTAKEN_S`` after the head was due.

        The first request of a model reserves all replicas on which it could start against tenants
        that are too far ahead (``LEAD_S``), except replicas that it declines although they have
        room (*No idle waiting*).
        """
        if place.priority <= self.left.get(row, -inf) or self._is_too_far_ahead(row, place):
            return True
        rank = self.shares.tag(place.key), place.due
        moves = place.row is not None and place.row != row
        for (model, _), line in self._replicas.get(row, {}).items():
            head = line.head()
            if head.priority < place.priority:
                continue
            if head.priority > place.priority:
                return True
            before = (self.shares.tag(head.key), head.due) < rank
            if model != place.model:
                reserved = before and head.due + OVERTAKEN_S < place.since
            else:
                reserved = before or moves or line.next_due(place.key) < place.due
            if reserved:
                return True
        return False

    def _is_too_far_ahead(self, row: int, place: Place) -> bool:
        """Return True if the place's tenant is too far ahead of the tenant of the model's first
        request, and the first request could use the replica."""
        if (line := self._models.get((place.model, False))) is None:
            return False
        head = line.head()
        if head.priority != place.priority or not head.could_use(row):
            return False
        lead = self.shares.tag(place.key) - self.shares.tag(head.key)
        return lead > LEAD_S * len(head.usable)


def _remove(request: Waiting, lines: Lines) -> None:
    lines[request.line].leave(request)
    if not lines[request.line]:
        del lines[request.line]
