"""LoRA adapters: which each replica has loaded, and what a request for one waits for there.

vLLM has at most ``max_loras`` adapters in a batch: its slots. A request for an adapter in the batch
joins it; one for another waits until all requests for one of those have ended. In slots that are
not in use the adapters of late stay loaded.
"""

from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat
from math import inf, nan
from statistics import median

import numpy as np

from extproc.fleet.ledger import Ledger
from extproc.fleet.tables import Replicas
from extproc.predict.completion import AdapterTimes
from extproc.predict.inputs import FleetView
from extproc.predict.lengths import OutputLengths
from extproc.replica_state import ReplicaState

LOAD_S = 0.1  # seconds that it takes to load an adapter, until a replica has shown it
_REMEMBERED = 16  # loads of a replica, and waits of the fleet
_MOST_OVERRUN = 10.0
_MOST_SLOTS = 256  # slots, and adapters in use, that are told apart; no server has as many
_UNBOUNDED = 131_072.0  # tokens that a sequence of which nothing is known may generate
_MEMORY_S = 60.0  # without a request, after which another one is unlikely, by e to 1


@dataclass(slots=True)
class _Replica:
    slots: int = 0  # 0: not known
    used: dict[str, set[int]] = field(default_factory=dict)
    """Adapters in use: tickets of this router's requests for each; none: only polls see any. The
    first adapters have the slots, the others wait for one in this order."""
    used_at: dict[str, float] = field(default_factory=dict)
    """Of each adapter that is in use or loaded: when its use began, ended or was polled."""
    polled_at: float = -inf
    loads: deque[float] = field(default_factory=lambda: deque([LOAD_S], _REMEMBERED))  # seconds
    starts: dict[str, float] = field(default_factory=dict)
    """When each adapter that is in use or loaded has a slot; −∞: it has one."""


class AdapterSlots:
    """What each replica has loaded, by what was sent there and what polls said.

    After a request or a poll the replica's slots are forecast: the k-th adapter that waits gets one
    when all requests for k of those before it have ended. A decision reads the forecasts.
    """

    def __init__(
        self, table: Replicas, members: Mapping[str, int], ledger: Ledger, lengths: OutputLengths
    ) -> None:
        self._table = table
        self._members = members
        self._ledger = ledger
        self._lengths = lengths
        self._replicas: dict[int, _Replica] = {}  # by row
        self._overruns: deque[float] = deque([1.0], _REMEMBERED)
        self._overrun = 1.0  # their median
        self._tickets: dict[int, tuple[int, str]] = {}  # row and adapter of requests in flight

    def clear(self, row: int) -> None:
        """Forgets all of a replica: another one has its row, or its process started anew."""
        self._replicas[row] = _Replica()
        self._table.adapter_at[row] = self._table.adapter_load_s[row] = 0.0

    def polled(self, row: int, state: ReplicaState, asked_at: float, now: float) -> None:
        """Takes the adapters in use, in a poll that was sent at that time on the fleet's clock."""
        one = self._replicas[row]
        one.slots = min(state.max_loras, _MOST_SLOTS)
        if not one.slots:
            return
        # What this router began or ended since the poll before may be what this one saw.
        in_use, before = state.adapters_in_use[:_MOST_SLOTS], one.polled_at
        seen = [name for name in in_use if one.used_at.get(name, -inf) <= before]
        own = {name: tickets for name, tickets in one.used.items() if tickets}
        one.used = {name: own.get(name, set()) for name in (*seen, *own)}
        one.used_at |= dict.fromkeys(seen, asked_at)
        one.polled_at = asked_at
        self._table.adapter_load_s[row] = median(one.loads)
        self._forecast(row, now)

    def sent(self, row: int, ticket: int, adapter: str, now: float) -> None:
        one = self._replicas[row]
        if adapter and one.slots:
            self._tickets[ticket] = row, adapter
            if not one.used.get(adapter):
                one.used_at[adapter] = now
            one.used.setdefault(adapter, set()).add(ticket)
            self._forecast(row, now)

    def moved(self, ticket: int, row: int, now: float) -> None:
        _, adapter = self._tickets.get(ticket, (row, ""))
        self.ended(ticket, now)
        self.sent(row, ticket, adapter, now)

    def ended(self, ticket: int, now: float) -> None:
        row, adapter = self._tickets.pop(ticket, (-1, ""))
        if adapter and ticket in (tickets := self._replicas[row].used.get(adapter, set())):
            one = self._replicas[row]
            tickets.remove(ticket)
            if not tickets:
                del one.used[adapter]
                one.used_at[adapter] = now
            self._forecast(row, now)

    def load_measured(self, replica: str, seconds: float) -> None:
        """A request there, whose adapter was to be loaded, got its first token so much later."""
        if (row := self._members.get(replica)) is not None:
            loads = self._replicas[row].loads
            loads.append(max(seconds, 0.0))
            self._table.adapter_load_s[row] = median(loads)

    def wait_measured(self, overrun: float) -> None:
        """A request waited for a slot so many times as long as for what had come before it."""
        self._overruns.append(min(max(overrun, 1.0), _MOST_OVERRUN))
        self._overrun = median(self._overruns)

    def times(self, view: FleetView, now: float) -> AdapterTimes:
        """Wait and load of a request for an adapter, by candidate."""
        table, rows, overrun = self._table, view.rows, self._overrun
        places = [self._replicas[row].starts for row in rows.tolist()]
        known = np.array([*map(dict.get, places, view.adapters, repeat(nan))])
        starts = np.where(np.isnan(known), table.adapter_at[rows], known)
        wait = overrun * np.maximum(starts - now, 0.0)
        load = table.adapter_load_s[rows] * (starts > -inf)
        asked_again = np.exp(np.minimum(table.idle_adapter_at[rows] - now, 0.0) / _MEMORY_S)
        return AdapterTimes(wait, load, load * (view.batch + asked_again), overrun)

    def _forecast(self, row: int, now: float) -> None:
        one, table = self._replicas[row], self._table
        idle = sorted(one.used_at.keys() - one.used.keys(), key=one.used_at.__getitem__)
        idle = idle[max(len(one.used_at) - one.slots, 0) :]
        one.used_at = {name: one.used_at[name] for name in (*one.used, *idle)}
        typical = self._lengths.expected(0, _UNBOUNDED)
        typical *= table.decode_step.item(row) / table.tokens_per_step.item(row)
        requests = self._ledger.ends(row) if len(one.used) >= one.slots else {}
        ends = [-inf] * one.slots  # when adapters give slots back, the earliest first
        one.starts = dict.fromkeys(("", *idle), -inf)  # "" stands for no adapter
        for place, (name, tickets) in enumerate(one.used.items()):
            one.starts[name] = ends[place]
            left = max((requests.get(ticket, now) - now for ticket in tickets), default=typical)
            insort(ends, max(ends[place], now) + max(left, 0.0))
        table.adapter_at[row] = max(ends[len(one.used)], now)
        is_full = len(one.used_at) >= one.slots
        dropped_at = one.used_at[idle[0]] if idle else now
        table.idle_adapter_at[row] = dropped_at if is_full else -inf
