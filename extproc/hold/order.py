"""The order in which requests wait."""

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from itertools import islice

from extproc.hold.waiting import Waiting

_MOST_TENANTS = 10_000
"""Remembered without anything waiting."""


class Order:
    """Higher priority first; then the tenant that got least; then by deadline; then by arrival.

    What a tenant got is counted in predicted seconds of a replica, while its requests wait: one
    that had none waiting begins level with whoever goes next (start-time fair queueing; Goyal, Vin
    and Cheng, 1996).
    """

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, list[Waiting]]] = {}
        """By priority and tenant, each in order."""
        self._got: dict[str, float] = {}
        """Seconds, by tenant."""
        self._level = 0.0
        """What the tenant had got that went last, before that."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, one: Waiting) -> None:
        """It waits from now on."""
        tenant, tenants = one.tenant, self._lines.setdefault(one.priority, {})
        if tenant not in tenants:
            tenants[tenant] = []
            self._got[tenant] = max(self._got.get(tenant, 0.0), self._level)
        insort(tenants[tenant], one, key=_due)
        self._count += 1

    def leave(self, one: Waiting) -> None:
        """It does not wait any more."""
        tenants = self._lines[one.priority]
        line = tenants[one.tenant]
        line.remove(one)
        self._count -= 1
        if not line:
            del tenants[one.tenant]
            if not tenants:
                del self._lines[one.priority]
            self._forget_some()

    def sent(self, one: Waiting) -> None:
        """It goes, and its tenant has got that much more."""
        tenant = one.tenant
        self._level = max(self._level, self._got[tenant])
        self._got[tenant] += one.carried.cost
        self.leave(one)

    def first(self, most: int) -> Iterator[Waiting]:
        """The first ``most``, in order, as if each went; it may, or leave, before the next."""
        return islice(self._all(most), most)

    def _all(self, most: int) -> Iterator[Waiting]:
        for priority in sorted(self._lines, reverse=True):
            lines = self._lines[priority]
            turns = [(self._got[tenant], tenant, iter(lines[tenant][:most])) for tenant in lines]
            heapify(turns)
            while turns:
                got, tenant, line = turns[0]
                if (one := next(line, None)) is None:
                    heappop(turns)
                else:
                    heapreplace(turns, (got + one.carried.cost, tenant, line))
                    yield one

    def _forget_some(self) -> None:
        """Of tenants that would begin level anyway."""
        if len(self._got) > _MOST_TENANTS:
            waiting = {tenant for lines in self._lines.values() for tenant in lines}
            self._got = {
                tenant: got
                for tenant, got in self._got.items()
                if got > self._level or tenant in waiting
            }


def _due(one: Waiting) -> tuple[float, float]:
    return one.deadline, one.since
