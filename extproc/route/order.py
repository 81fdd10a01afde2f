"""The order in which requests wait for a replica, and in which a full queue refuses them."""

from bisect import bisect_left, insort
from collections import Counter
from heapq import nlargest
from math import exp, inf
from operator import itemgetter
from typing import Any, Generic, TypeVar

from extproc.route.waiting import Key, Place, Waiting

_MOST_TENANTS = 10_000  # remembered, with requests in the queue or without
_LITTLE_S = 1e-3
_MEMORY_S = 60.0  # seconds in which a tenant's recent share loses two thirds of its weight

Item = TypeVar("Item")


class Ranked(Generic[Item]):
    """Items in the order of their ranks, tuples that differ."""

    def __init__(self) -> None:
        self._ranks: dict[object, tuple[Any, ...]] = {}
        self._order: list[tuple[tuple[Any, ...], Item]] = []

    def __len__(self) -> int:
        return len(self._order)

    def put(self, item: Item, *rank: Any) -> None:
        """Add an item, or change its rank."""
        self.drop(item)
        self._ranks[item] = rank
        insort(self._order, (rank, item))

    def drop(self, item: Item) -> None:
        if item in self._ranks:
            del self._order[self.position(item)], self._ranks[item]

    def position(self, item: object) -> int:
        """Number of items before this one; of all where it is none of them."""
        rank = self._ranks.get(item)
        return len(self._order) if rank is None else bisect_left(self._order, (rank, item))

    def first(self) -> tuple[tuple[Any, ...], Item]:
        """The first item, behind its rank."""
        return self._order[0]


class Shares:
    """Replica-seconds that each tenant received while its requests waited.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996), for each model and priority: the tenant
    with the lowest tag is next, and a request adds its cost to the tag of its tenant. A tenant
    without queued requests begins at the tag that was served last, so nobody saves up service, and
    nobody pays for quiet hours of others.
    """

    def __init__(self, now: float) -> None:
        self._tags: dict[Key, float] = {}
        self._levels: dict[tuple[str, int], float] = {}  # by model and priority: highest tag served
        self._queued = Counter[Key]()
        self._recent: dict[str, float] = {}  # replica-seconds by tenant, decayed
        self._at = now

    def tag(self, key: Key) -> float:
        """Position of a tenant among those of its model and priority, in replica-seconds."""
        tag = self._tags.get(key, 0.0)
        return tag if key in self._queued else max(tag, self._levels.get(key[:2], 0.0))

    def enter(self, key: Key) -> None:
        self._tags[key] = self.tag(key)
        self._queued[key] += 1
        self._forget()

    def leave(self, key: Key) -> None:
        self._queued[key] -= 1
        if not self._queued[key]:
            del self._queued[key]

    def __contains__(self, key: Key) -> bool:
        """Return True if the tenant has requests queued."""
        return key in self._queued

    def __len__(self) -> int:
        """Tenants with queued requests."""
        return len(self._queued)

    def sent(self, key: Key, cost: float) -> None:
        """Count a dispatched request of ``cost`` replica-seconds."""
        tag, tenant = self.tag(key), key[2]
        self._levels[key[:2]] = max(self._levels.get(key[:2], 0.0), tag)
        self._tags[key] = tag + cost
        self._recent[tenant] = self._recent.get(tenant, 0.0) + cost
        self._forget()

    def _forget(self) -> None:
        """Keep the tags of queued tenants, and of as many others as are remembered."""
        if len(self._tags) <= 2 * _MOST_TENANTS + len(self._queued):
            return
        highest = nlargest(_MOST_TENANTS, self._tags.items(), key=itemgetter(1))
        self._tags = {key: self._tags[key] for key in self._queued} | dict(highest)
        most = nlargest(_MOST_TENANTS // 2, self._recent, key=self._recent.__getitem__)
        self._recent = {name: self._recent[name] for name in most}

    def recent(self, now: float) -> dict[str, float]:
        """Replica-seconds by tenant, decayed with a time constant of 60 s."""
        faded = exp((self._at - now) / _MEMORY_S)
        self._at = now
        left = ((tenant, got * faded) for tenant, got in self._recent.items())
        self._recent = {tenant: got for tenant, got in left if got > _LITTLE_S}
        return self._recent


class Line:
    """Queued requests in order: by priority, then tag of the tenant, then due time."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._groups: dict[Key, Ranked[Waiting]] = {}
        self._turns = Ranked[Key]()  # of the groups

    def __len__(self) -> int:
        return len(self._groups)

    def enter(self, one: Waiting) -> None:
        if one.key not in self._groups:
            self._groups[one.key] = Ranked()
            self._turns.put(one.key, *self._turn(one.key))
        self._groups[one.key].put(one, one.due, one.number)

    def leave(self, one: Waiting) -> None:
        group = self._groups[one.key]
        group.drop(one)
        if not group:
            del self._groups[one.key]
            self._turns.drop(one.key)

    def head(self) -> Waiting:
        """The first request of a line that is not empty.

        Tags only grow, each by a dispatch, so a turn that is up to date precedes all others.
        """
        while True:
            turn, key = self._turns.first()
            if turn == (current := self._turn(key)):
                return self._groups[key].first()[1]
            self._turns.put(key, *current)

    def depth(self, place: Place) -> float:
        """Share of its tenant's requests that go before that place, 0…1."""
        group = self._groups.get(place.key)
        return group.position(place) / len(group) if group else 1.0

    def next_due(self, key: Key) -> float:
        """Due time of the first request of a tenant; infinite where it has none."""
        group = self._groups.get(key)
        return group.first()[1].due if group else inf

    def _turn(self, key: Key) -> tuple[int, float, Key]:
        return -key[1], self._shares.tag(key), key


class Tenants:
    """Queued requests by priority and tenant, the oldest first; finds whom to refuse."""

    def __init__(self) -> None:
        self._queued: dict[tuple[int, str], dict[Waiting, None]] = {}
        self._most = Ranked[tuple[int, str]]()  # the lowest priority first, the largest group

    def __contains__(self, tenant: tuple[int, str]) -> bool:
        return tenant in self._queued

    def enter(self, one: Waiting) -> None:
        self._queued.setdefault(one.key[1:], {})[one] = None
        self._rank(one)

    def leave(self, one: Waiting) -> None:
        del self._queued[one.key[1:]][one]
        self._rank(one)

    def _rank(self, one: Waiting) -> None:
        tenant = one.key[1:]
        if many := len(self._queued[tenant]):
            self._most.put(tenant, one.priority, -many, one.tenant)
        else:
            del self._queued[tenant]
            self._most.drop(tenant)

    def victim(self) -> Waiting:
        """Among the lowest priority, the newest request of the tenant with the most queued."""
        _, tenant = self._most.first()
        return next(reversed(self._queued[tenant]))
