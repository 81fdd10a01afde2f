"""Order in which queued requests start: priority, fair share of the tenant, then due time."""

from bisect import bisect_left, insort
from collections.abc import Collection
from heapq import nlargest
from math import exp, inf
from operator import itemgetter
from typing import Any, Generic, TypeVar

from extproc.route.waiting import Key, Place, Waiting

_MOST_TENANTS = 10_000  # tenants remembered while they have no queued requests
_NEGLIGIBLE_S = 1e-3  # recent replica-seconds below which a tenant is forgotten
_MEMORY_S = 60.0  # seconds in which a tenant's recent share loses two thirds of its weight

Item = TypeVar("Item")


class Ranked(Generic[Item]):
    """Items sorted by rank. Ranks are tuples, and no two are equal."""

    def __init__(self) -> None:
        self._ranks: dict[object, tuple[Any, ...]] = {}
        self._order: list[tuple[tuple[Any, ...], Item]] = []

    def __len__(self) -> int:
        return len(self._order)

    def put(self, item: Item, *rank: Any) -> None:
        self.drop(item)
        self._ranks[item] = rank
        insort(self._order, (rank, item))

    def drop(self, item: Item) -> None:
        if item in self._ranks:
            del self._order[self.position(item)], self._ranks[item]

    def position(self, item: object) -> int:
        """Count the items before this item; all items if this item is not among them."""
        rank = self._ranks.get(item)
        return len(self._order) if rank is None else bisect_left(self._order, (rank, item))

    def first(self) -> tuple[tuple[Any, ...], Item]:
        return self._order[0]


class Shares:
    """Replica-seconds that each tenant received while its requests waited.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996), for each priority: the tenant with the
    lowest tag is next, and a request for any model adds its cost to the tag of its tenant. When a
    tenant queues again, its tag rises to at least the highest tag served so far. So an idle tenant
    saves up no service, and no tenant pays for the idle hours of others.
    """

    def __init__(self, now: float, queued: Collection[Key]) -> None:
        """``queued``: live view of the tenants with queued requests, kept by the backlog."""
        self._tags: dict[Key, float] = {}
        self._levels: dict[int, float] = {}  # by priority: highest tag served
        self._queued = queued
        self._recent: dict[str, float] = {}  # replica-seconds by tenant, decayed
        self._at = now

    def __contains__(self, key: Key) -> bool:
        return key in self._queued

    def tag(self, key: Key) -> float:
        """Start tag of a tenant, in replica-seconds: among tenants of a priority, the lowest tag is
        next."""
        tag = self._tags.get(key, 0.0)
        return tag if key in self._queued else max(tag, self._levels.get(key[0], 0.0))

    def enter(self, key: Key) -> None:
        """Fix the tag of a tenant that is about to queue a request."""
        if len(self._tags) > 2 * _MOST_TENANTS + len(self._queued):
            highest = nlargest(_MOST_TENANTS, self._tags.items(), key=itemgetter(1))
            self._tags = {queued: self._tags[queued] for queued in self._queued} | dict(highest)
        self._tags[key] = self.tag(key)

    def charge(self, key: Key, cost: float) -> None:
        """Add the ``cost`` of a dispatched request, in replica-seconds, to its tenant."""
        tag, (priority, tenant) = self.tag(key), key
        self._levels[priority] = max(self._levels.get(priority, 0.0), tag)
        self._tags[key] = tag + cost
        self._recent[tenant] = self._recent.get(tenant, 0.0) + cost

    def recent(self, now: float) -> dict[str, float]:
        """Replica-seconds by tenant, decayed with a time constant of 60 s."""
        decay = exp((self._at - now) / _MEMORY_S)
        self._at = now
        decayed = ((tenant, received * decay) for tenant, received in self._recent.items())
        self._recent = {name: received for name, received in decayed if received > _NEGLIGIBLE_S}
        return self._recent


class Line:
    """Queued requests for a model in order: by priority, tag of the tenant, and due time."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._groups: dict[Key, Ranked[Waiting]] = {}
        self._turns = Ranked[Key]()  # order of the groups

    def __len__(self) -> int:
        return len(self._groups)

    def enter(self, request: Waiting) -> None:
        if request.key not in self._groups:
            self._groups[request.key] = Ranked()
            self._turns.put(request.key, *self._turn(request.key))
        self._groups[request.key].put(request, request.due, request.number)

    def leave(self, request: Waiting) -> None:
        group = self._groups[request.key]
        group.drop(request)
        if not group:
            del self._groups[request.key]
            self._turns.drop(request.key)

    def head(self) -> Waiting:
        while True:
            turn, key = self._turns.first()
            if turn == (current := self._turn(key)):
                return self._groups[key].first()[1]
            self._turns.put(key, *current)

    def depth(self, place: Place) -> float:
        """Share, 0…1, of the tenant's requests in this line that go before the place."""
        group = self._groups.get(place.key)
        return group.position(place) / len(group) if group else 1.0

    def next_due(self, key: Key) -> float:
        """Due time of a tenant's first request; infinite if the tenant has no request here."""
        group = self._groups.get(key)
        return group.first()[1].due if group else inf

    def _turn(self, key: Key) -> tuple[int, float, Key]:
        return -key[0], self._shares.tag(key), key
