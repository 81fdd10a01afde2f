"""Requests that wait at this router, by model and by replica, and the replicas they reserve."""

import numpy as np

from extproc.predict.inputs import FleetView, Floats
from extproc.route.order import Line, Shares, Tenants
from extproc.route.waiting import OVERTAKEN_S, Place, Waiting

_RUNS_BEFORE = 0.3
"""Fraction of the queued work ahead that delays a request where places in the batch are free, so
that it may start before larger ones that wait for KV space. Where none is free, all of it does.
With 1.0 throughout requests wait less for the replica that suits them: the mean completion of
simulated overload (azure-2023-conv ×2.4, seconds 500 to 1,000) rises by a tenth."""

Lines = dict[str, Line]  # by model


class Backlog:
    """Lines of queued requests, one for each model, and one for each replica and model."""

    def __init__(self, now: float) -> None:
        self.shares = Shares(now)
        self.tenants = Tenants()
        self._models: Lines = {}
        self._replicas: dict[int, Lines] = {}  # by row
        self._load: dict[int, Floats] = {}
        """By priority: requests that wait for the replica of each row, and their replica-seconds.
        The last row stands for all those that follow, for which nothing waits."""
        self._seconds: dict[tuple[int, str], float] = {}  # the same by priority and tenant

    def __bool__(self) -> bool:
        return bool(self._models)

    def enter(self, one: Waiting) -> None:
        self.shares.enter(one.key)
        self.tenants.enter(one)
        self._seconds.setdefault(one.key[1:], 0.0)
        self._take_in(one, self._models)
        self.await_replica(one)

    def leave(self, one: Waiting) -> None:
        self.await_no_more(one)
        _take_out(one, self._models)
        self.tenants.leave(one)
        if one.key[1:] not in self.tenants:
            del self._seconds[one.key[1:]]
        self.shares.leave(one.key)

    def await_replica(self, one: Waiting) -> None:
        if one.row is not None:
            self._count(one, one.row, 1.0)
            self._take_in(one, self._replicas.setdefault(one.row, {}))

    def await_no_more(self, one: Waiting) -> None:
        if one.row is None:
            return
        self._count(one, one.row, -1.0)
        _take_out(one, self._replicas[one.row])
        if not self._replicas[one.row]:
            del self._replicas[one.row]
        if not self._replicas:
            self._load.clear()

    def _count(self, one: Waiting, row: int, sign: float) -> None:
        load = self._load.setdefault(one.priority, np.zeros((2, 1)))
        if row + 1 >= load.shape[1]:
            load = self._load[one.priority] = np.hstack([load, np.zeros((2, row + 1))])
        load[:, row] += sign, sign * one.cost
        self._seconds[one.key[1:]] += sign * one.cost

    def _take_in(self, one: Waiting, lines: Lines) -> None:
        if one.model not in lines:
            lines[one.model] = Line(self.shares)
        lines[one.model].enter(one)

    def is_first(self, one: Waiting) -> bool:
        """Return True for the first request of its model."""
        return self._models[one.model].head() is one

    def firsts(self, models: int) -> list[Waiting]:
        """The first request of each model; of so many models, by turns."""
        found = []
        for model in list(self._models)[:models]:
            line = self._models[model] = self._models.pop(model)
            found.append(line.head())
        return found

    def heads(self, row: int, models: int) -> list[Waiting]:
        """Requests that may go to a replica, in their order: the first of each model that waits for
        it; behind these, of the same priority, the first of each model that may use it.

        Of the latter only so many ``models`` are looked at, by turns.
        """
        found = {line.head(): 0 for line in self._replicas.get(row, {}).values()}
        for head in self.firsts(models):
            if row in head.usable:
                found.setdefault(head, 1)
        return sorted(found, key=lambda one: (-one.priority, found[one], one.due))

    def ahead(self, view: FleetView, place: Place) -> tuple[Floats, Floats]:
        """Requests that wait for each candidate and go before one in that place, unless they are of
        its own priority and behind it; and seconds by which those before it delay it.

        Requests of higher priority go first. Of the same priority T tenants take turns: at most T·w
        of work precedes the last request of a tenant with work w queued.
        """
        requests, seconds = np.zeros((2, len(view)))
        for priority, load in self._load.items():
            if priority >= place.priority:
                many, work = load.take(view.rows, axis=1, mode="clip")
                requests += many
                seconds += self._share(priority, load[1], place) * work
        places = view.max_num_seqs - view.batch - view.waiting
        return requests, np.maximum(seconds, 0.0) * np.where(places > 0.0, _RUNS_BEFORE, 1.0)

    def _share(self, priority: int, seconds: Floats, place: Place) -> float:
        """Share of the work of a priority that goes before that place."""
        total = float(seconds.sum())
        if priority > place.priority or total <= 0.0:
            return 1.0
        line = self._models.get(place.model)
        turns = len(self.shares) * self._seconds.get(place.key[1:], 0.0)
        return (line.depth(place) if line else 1.0) * min(turns / total, 1.0)

    def reserves(self, row: int, place: Place) -> bool:
        """Return True if a replica is reserved for a queued request that goes before that place.

        The head of a line reserves its replica against its own model, and against all lower
        priorities. It reserves the replica against another model's request of the same priority
        only if that arrived more than B seconds after the head was due.
        """
        rank = self.shares.tag(place.key), place.due
        moves = place.row is not None and place.row != row
        for model, line in self._replicas.get(row, {}).items():
            head = line.head()
            if head.priority < place.priority:
                continue
            if head.priority > place.priority:
                return True
            if model != place.model:
                reserved = head.due + OVERTAKEN_S < place.since
            else:
                before = (self.shares.tag(head.key), head.due) < rank
                reserved = before or moves or line.next_due(place.key) < place.due
            if reserved:
                return True
        return False


def _take_out(one: Waiting, lines: Lines) -> None:
    lines[one.model].leave(one)
    if not lines[one.model]:
        del lines[one.model]
