"""Requests that wait at this router, by model and by replica, and the replicas they reserve."""

from collections import Counter
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from extproc.predict.inputs import Floats, Indices
from extproc.route.order import OVERTAKEN_S, Line, Queued, Shares, key_of

_RUNS_BEFORE = 0.3
"""Fraction of the queued work ahead that delays a request; the rest starts elsewhere, or beside it.
With 1.0 requests wait less for the replica that suits them: the mean completion of simulated
overload rises by a fifth (azure-2023-conv ×2.4) and a sixth (mooncake-synthetic ×3)."""


class Awaiting(Queued, Protocol):
    """A queued request with the replicas that it may use."""

    usable: frozenset[int]  # rows of the fleet's table


Request = TypeVar("Request", bound=Awaiting)
Lines = dict[str, Line[Request]]  # by model


@dataclass(slots=True)
class Place:
    """A request's place among those that wait."""

    model: str
    priority: int
    tenant: str
    since: float  # arrival, seconds on the queue's clock
    due: float  # key within its tenant, seconds on the same clock
    row: int | None = None  # of the replica that it waits for
    depth: float = 1.0  # share of its tenant's queued requests that go before it, 0…1
    last_chance: bool = False  # starts now wherever it can, or is refused


class Backlog(Generic[Request]):
    """Lines of queued requests, one for each model, and one for each replica and model."""

    def __init__(self, now: float) -> None:
        self.shares = Shares(now)
        self._models: Lines[Request] = {}
        self._replicas: dict[int, Lines[Request]] = {}  # by row
        self._seconds: dict[int, Floats] = {}  # replica-seconds by priority, of each row
        self._tenants: dict[tuple[int, str], float] = {}  # the same by tenant, of all rows
        self._counts = Counter[tuple[int, str]]()  # requests of each of these
        self._requests: Floats = np.zeros(0)  # of each row

    def __bool__(self) -> bool:
        return bool(self._models)

    def enter(self, one: Request) -> None:
        self.shares.enter(key_of(one))
        self._take_in(one, self._models)

    def leave(self, one: Request) -> None:
        _take_out(one, self._models)
        self.shares.leave(key_of(one))

    def await_replica(self, one: Request, row: int) -> None:
        self._widen(one.priority, row)
        self._seconds[one.priority][row] += one.cost
        self._requests[row] += 1.0
        key = one.priority, one.tenant
        self._tenants[key] = self._tenants.get(key, 0.0) + one.cost
        self._counts[key] += 1
        self._take_in(one, self._replicas.setdefault(row, {}))

    def await_no_more(self, one: Request, row: int) -> None:
        self._seconds[one.priority][row] -= one.cost
        self._requests[row] -= 1.0
        key = one.priority, one.tenant
        self._tenants[key] -= one.cost
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key], self._tenants[key]
        _take_out(one, self._replicas[row])
        if not self._replicas[row]:
            del self._replicas[row]
        if not self._replicas:
            self._seconds.clear()

    def _take_in(self, one: Request, lines: Lines[Request]) -> None:
        if one.model not in lines:
            lines[one.model] = Line(self.shares, one.model)
        lines[one.model].enter(one)

    def is_first(self, one: Request) -> bool:
        """Return True for the first request of its model."""
        return self._models[one.model].head() is one

    # -- what it tells ----------------------------------------------------------------------

    def depth(self, one: Request) -> float:
        """Share of its tenant's requests for the same model that go before a request, 0…1."""
        return self._models[one.model].depth(one)

    def firsts(self, models: int) -> list[Request]:
        """The first request of each model; of so many models, by turns."""
        found = []
        for model in list(self._models)[:models]:
            line = self._models[model] = self._models.pop(model)
            found.append(line.head())
        return found

    def heads(self, row: int, models: int) -> list[Request]:
        """Requests that may go to a replica, in their order: the first of each model that waits for
        it; behind these, of the same priority, the first of each model that may use it.

        Of the latter only so many ``models`` are looked at, by turns.
        """
        found = {line.head(): 0 for line in self._replicas.get(row, {}).values()}
        for head in self.firsts(models):
            if row in head.usable:
                found.setdefault(head, 1)
        return sorted(found, key=lambda one: (-one.priority, found[one], one.due))

    def requests(self, rows: Indices) -> Floats:
        """Requests that wait for each replica."""
        return _of(self._requests, rows)

    def ahead_s(self, rows: Indices, place: Place) -> Floats:
        """Seconds for which each replica serves queued requests before one in that place.

        Requests of higher priority go first. Of the same priority T tenants take turns: at most T·w
        of work precedes the last request of a tenant with work w queued.
        """
        ahead = np.zeros(len(rows))
        for priority, seconds in self._seconds.items():
            if priority >= place.priority:
                ahead += self._share(priority, seconds, place) * _of(seconds, rows)
        return _RUNS_BEFORE * np.maximum(ahead, 0.0)

    def _share(self, priority: int, seconds: Floats, place: Place) -> float:
        """Share of the work of a priority that goes before that place."""
        total = float(seconds.sum())
        if priority > place.priority or total <= 0.0:
            return 1.0
        turns = len(self.shares) * self._tenants.get((priority, place.tenant), 0.0)
        return place.depth * min(turns / total, 1.0)

    def reserves(self, row: int, place: Place) -> bool:
        """Return True if a replica is reserved for a queued request that goes before that place.

        The head of a line reserves its replica against its own model, and against all lower
        priorities. It reserves the replica against another model's request of the same priority
        only if that arrived more than B seconds after the head was due.
        """
        rank = self.shares.tag(key_of(place)), place.due
        moves = place.row is not None and place.row != row
        for model, line in self._replicas.get(row, {}).items():
            head = line.head()
            if head.priority != place.priority:
                if head.priority > place.priority:
                    return True
                continue
            before = (self.shares.tag(key_of(head)), head.due) < rank
            if model == place.model:
                own = line.next_due(place.priority, place.tenant)
                if before or moves or own < place.due:
                    return True
            elif head.due + OVERTAKEN_S < place.since:
                return True
        return False

    def _widen(self, priority: int, row: int) -> None:
        seconds = self._seconds.setdefault(priority, np.zeros(0))
        if len(seconds) <= row:
            self._seconds[priority] = np.append(seconds, np.zeros(row + 1))
        if len(self._requests) <= row:
            self._requests = np.append(self._requests, np.zeros(row + 1))


def _of(column: Floats, rows: Indices) -> Floats:
    """The figures of those rows; 0 where the column is too short."""
    found = np.zeros(len(rows))
    known = rows < len(column)
    found[known] = column[rows[known]]
    return found


def _take_out(one: Request, lines: Lines[Request]) -> None:
    lines[one.model].leave(one)
    if not lines[one.model]:
        del lines[one.model]
