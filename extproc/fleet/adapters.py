"""LoRA adapters: which each replica has loaded, and what a request for one waits for there."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp, inf
from statistics import median

import numpy as np

from extproc.fleet.tables import Requests
from extproc.predict.completion import AdapterTimes
from extproc.predict.inputs import FleetView
from extproc.replica_state import ReplicaState

LOAD_S = 0.1  # seconds that it takes to load an adapter, until a replica has shown it
_REMEMBERED = 15  # loads of a replica, and waits of the fleet
_MOST_OVERRUN = 10.0
_MOST_SLOTS = 256  # adapters in a batch, and in use, that are told apart; no server has as many
_MEMORY = 60.0
"""Seconds without a request after which it is unlikely, by e to 1, that one for an adapter comes
before others have driven it out."""


@dataclass(slots=True)
class _Row:
    names: frozenset[str] = frozenset()
    slots: int = 0  # of a batch; 0: not known
    loaded: dict[str, float] = field(default_factory=dict)  # last use of each; as many as slots
    in_use: dict[str, int] = field(default_factory=dict)
    """This router's requests in flight. In the order the adapters came, so that the first ones have
    the slots: vLLM lets no other in before all requests for one of them have ended. A poll tells
    where they came in another order."""
    since: dict[str, float] = field(default_factory=dict)  # arrival of those in use
    polled_at: float = -inf
    beyond: tuple[str, ...] = ()  # in use by what only polls saw
    load_s: float = LOAD_S  # seconds that a load should take: the median of the last ones
    loads: deque[float] = field(default_factory=lambda: deque([LOAD_S], _REMEMBERED))

    def touch(self, name: str, at: float) -> None:
        self.loaded[name] = max(self.loaded.get(name, at), at)
        while len(self.loaded) > max(self.slots, 1):
            del self.loaded[min(self.loaded, key=self.loaded.__getitem__)]

    def users(self) -> list[str]:
        """Adapters in use, those that have a slot first."""
        return list(dict.fromkeys((*self.beyond, *self.in_use)))


class Adapters:
    """What each replica has loaded, by what was sent there and what polls said.

    vLLM tells how many may be in a batch, its slots, and which have requests that run, not how many
    (older ones also name those that wait). It keeps loaded what was used last. Of several routers
    each knows of the others' adapters what polls say.
    """

    def __init__(self, requests: Requests, members: Mapping[str, int]) -> None:
        self._requests = requests
        self._members = members
        self._rows: dict[int, _Row] = {}
        self._names: frozenset[str] = frozenset()  # whatever is an adapter anywhere
        self._overruns: deque[float] = deque([1.0], _REMEMBERED)
        self._overrun = 1.0  # the median of the last ones
        self._tickets: dict[int, tuple[int, str]] = {}
        """Replica and adapter of this router's requests for adapters, by ticket."""

    def polled(self, row: int, state: ReplicaState, asked_at: float) -> None:
        """A poll's news of the replica in that row, asked for at a time on the fleet's clock."""
        if not state.adapters and row not in self._rows:
            return
        known = self._rows.setdefault(row, _Row())
        known.slots = min(state.max_loras, _MOST_SLOTS)
        if (names := frozenset(state.adapters)) != known.names:
            known.names = names
            self._name()
        used = state.adapters_in_use[:_MOST_SLOTS]
        # Of one that this router used since the poll before, that request may be what was seen.
        known.beyond = tuple(
            name
            for name in used
            if name not in known.in_use and known.loaded.get(name, -inf) <= known.polled_at
        )
        seen = [name for name in used if known.since.get(name, inf) <= known.polled_at]
        known.polled_at = asked_at
        if len(used) <= known.slots:  # else some of them wait, and nobody says which
            for name in used:
                known.touch(name, asked_at)
            known.in_use = {name: known.in_use[name] for name in (*seen, *known.in_use)}

    def restarted(self, row: int) -> None:
        if known := self._rows.get(row):
            known.loaded.clear()

    def clear(self, row: int) -> None:
        if self._rows.pop(row, None):
            self._name()

    def sent(self, row: int, ticket: int, model: str, now: float) -> None:
        if model in self._names and (known := self._rows.get(row)) and model in known.names:
            self._tickets[ticket] = row, model
            known.in_use[model] = known.in_use.get(model, 0) + 1
            known.since.setdefault(model, now)
            known.touch(model, now)

    def moved(self, ticket: int, row: int, now: float) -> None:
        if ticket in self._tickets:
            _, model = self._tickets[ticket]
            self.ended(ticket, now)
            self.sent(row, ticket, model, now)

    def ended(self, ticket: int, now: float) -> None:
        row, model = self._tickets.pop(ticket, (-1, ""))
        if known := self._rows.get(row):
            known.in_use[model] = known.in_use.get(model, 1) - 1
            if known.in_use[model] <= 0:
                del known.in_use[model]
                known.since.pop(model, None)
            if model in known.loaded:
                known.touch(model, now)

    def took(self, replica: str, seconds: float) -> None:
        """A request there, whose adapter was to be loaded, got its first token so much later."""
        if known := self._rows.get(self._members.get(replica, -1)):
            known.loads.append(max(seconds, 0.0))
            known.load_s = median(known.loads)

    def waited(self, overrun: float) -> None:
        """A request waited for a place so many times as long as for what had come before it."""
        self._overruns.append(min(max(overrun, 1.0), _MOST_OVERRUN))
        self._overrun = median(self._overruns)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, model: str) -> bool:
        return model in self._names

    def times(self, view: FleetView, typical: float, now: float) -> AdapterTimes:
        """What a request for an adapter meets on the candidates.

        Args:
            view: the candidates, with the adapter that each is asked for.
            typical: tokens that a sequence of which nothing is known is expected to generate still.
            now: seconds.
        """
        nothing = np.zeros((3, len(view)))
        found = AdapterTimes(nothing[0], nothing[1], nothing[2], self._overrun)
        for place, (row, model) in enumerate(zip(view.rows.tolist(), view.adapters, strict=True)):
            known = self._rows.get(row)
            if known is None or model not in known.names or not known.slots:
                continue
            token = view.decode_step.item(place) / view.tokens_per_step.item(place)
            wait = self._overrun * self._wait(row, known, model, token, typical)
            found.wait[place] = wait
            if wait or (model not in known.loaded and model not in known.users()):
                found.load[place] = known.load_s
                lose = view.batch.item(place) + _asked_again(known, model, now)
                found.wasted[place] = known.load_s * lose
        return found

    def _name(self) -> None:
        self._names = frozenset().union(*(known.names for known in self._rows.values()))

    def _wait(self, row: int, known: _Row, model: str, token: float, typical: float) -> float:
        users = known.users()
        if len({*users, model}) <= known.slots:
            return 0.0
        left, ends = dict(self._left(row)), list[float]()
        for name in users:
            start = heappop(ends) if len(ends) == known.slots else 0.0
            if name == model:
                return start
            load = known.load_s if start else 0.0
            heappush(ends, start + load + left.get(name, typical) * token)
        return ends[0]

    def _left(self, row: int) -> Iterator[tuple[str, float]]:
        """Adapter and tokens to go of this router's requests there, the longest of each last."""
        requests = self._requests
        here = (requests.replica == row).nonzero()[0]
        here = here[requests.remaining[here].argsort()]
        tickets, left = requests.ticket[here].tolist(), requests.remaining[here].tolist()
        for ticket, tokens in zip(tickets, left, strict=True):
            if ticket in self._tickets:
                yield self._tickets[ticket][1], tokens


def _asked_again(known: _Row, model: str, now: float) -> float:
    """How likely it is that what is dropped for that adapter has to be loaded again, 0…1."""
    others = [used for name, used in known.loaded.items() if name != model]
    if len(others) < known.slots:
        return 0.0
    return exp((min(others) - now) / _MEMORY)
