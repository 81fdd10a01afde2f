"""The order in which requests wait for a replica."""

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace, nlargest
from math import exp
from statistics import median

from extproc.route.waiting import Waiting

_MOST_TENANTS = 10_000  # remembered, whether anything of theirs waits or not
_LITTLE_S = 1e-3
_MEMORY_S = 60.0  # seconds in which a tenant's recent share loses two thirds of its weight


class Shares:
    """What each tenant got, in predicted seconds of a replica, while its requests waited.

    One that had none waiting begins level with whoever went last (start-time fair queueing; Goyal,
    Vin and Cheng, 1996): nobody saves up, and nobody has to make up for quiet hours of others.
    """

    def __init__(self, now: float) -> None:
        self._got: dict[str, float] = {}
        self._level = 0.0
        self._recent: dict[str, float] = {}  # what each got as of late, in the same seconds
        self._at = now

    def of(self, tenant: str) -> float:
        return max(self._got.get(tenant, 0.0), self._level)

    def sent(self, tenant: str, cost: float) -> None:
        self._level = self.of(tenant)
        self._got[tenant] = self._level + cost
        self._recent[tenant] = self._recent.get(tenant, 0.0) + cost
        if len(self._got) > _MOST_TENANTS:
            self._level = max(self._level, median(self._got.values()))
            self._got = {name: got for name, got in self._got.items() if got > self._level}
            most = nlargest(_MOST_TENANTS // 2, self._recent, key=self._recent.__getitem__)
            self._recent = {name: self._recent[name] for name in most}

    def recent(self, now: float) -> dict[str, float]:
        """Seconds of a replica that each got as of late: what is older counts less and less."""
        faded = exp((self._at - now) / _MEMORY_S)
        self._at = now
        left = ((tenant, got * faded) for tenant, got in self._recent.items())
        self._recent = {tenant: got for tenant, got in left if got > _LITTLE_S}
        return self._recent


class Order:
    """Higher priority first; then the tenant that got least; then by deadline; then by arrival."""

    def __init__(self, now: float) -> None:
        self.shares = Shares(now)
        self._lines: dict[int, dict[str, list[Waiting]]] = {}  # by priority and tenant
        self._costs: dict[tuple[str, int], float] = {}  # of all of a model and a priority

    def enter(self, one: Waiting) -> None:
        tenants = self._lines.setdefault(one.priority, {})
        insort(tenants.setdefault(one.tenant, []), one, key=_due)
        key = one.model, one.priority
        self._costs[key] = self._costs.get(key, 0.0) + one.cost

    def leave(self, one: Waiting) -> None:
        tenants = self._lines[one.priority]
        tenants[one.tenant].remove(one)
        self._costs[one.model, one.priority] -= one.cost
        if not tenants[one.tenant]:
            del tenants[one.tenant]
        if not tenants:
            del self._lines[one.priority]
            self._costs = {key: left for key, left in self._costs.items() if key[1] != one.priority}

    def ahead(self, model: str, priority: int) -> float:
        """Seconds of a replica that go before one that comes now, for the same model."""
        costs = self._costs.items()
        return sum(cost for (name, other), cost in costs if name == model and other >= priority)

    def __iter__(self) -> Iterator[Waiting]:
        """In order, as if each went; it may, or leave, before the next."""
        for priority in sorted(self._lines, reverse=True):
            lines = self._lines[priority]
            turns = [(self.shares.of(name), name, iter([*line])) for name, line in lines.items()]
            heapify(turns)
            while turns:
                got, tenant, line = turns[0]
                if (one := next(line, None)) is None:
                    heappop(turns)
                else:
                    heapreplace(turns, (got + one.cost, tenant, line))
                    yield one


def _due(one: Waiting) -> tuple[float, float]:
    return one.deadline, one.since
