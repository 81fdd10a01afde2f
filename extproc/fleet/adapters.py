"""LoRA adapters: which adapters each replica has loaded, and how long a request waits for a slot.

vLLM has at most ``max_loras`` adapters in a batch: its slots. A request for an adapter in the batch
joins the batch. A request for another adapter waits until all requests for one of the adapters in
the batch have ended. Unused slots hold the adapters that were used last.
"""

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median

import numpy as np

from extproc.fleet.ledger import Ledger
from extproc.fleet.tables import Replicas
from extproc.predict.completion import AdapterTimes
from extproc.predict.inputs import FleetView
from extproc.predict.lengths import OutputLengths
from extproc.replica_state import ReplicaState

LOAD_S = 0.1  # assumed time to load an adapter, until a replica's loads are measured
_SAMPLES = 16  # measured loads of a replica
_MAX_SLOTS = 256  # limit of a replica's slots, and of its adapters in use: no server has as many
_MEMORY_S = 60.0  # idle time in which an adapter's chance of a request falls by a factor e


@dataclass(slots=True)
class _Slots:
    count: int = 0  # 0: not known
    in_use: dict[str, set[int]] = field(default_factory=dict)
    """Adapters in use → tickets of this router's requests; empty: only polls report the adapter.
    The first ``count`` adapters have the slots, and the others wait for a slot in this order."""
    used_at: dict[str, float] = field(default_factory=dict)
    """Adapters in use or loaded → when their use last began, ended, or was seen by a poll."""
    polled_at: float = -inf
    loads: deque[float] = field(default_factory=lambda: deque([LOAD_S], _SAMPLES))  # seconds
    starts: dict[str, float] = field(default_factory=dict)
    """Adapters in use or loaded → when each gets its slot; −∞: it has a slot."""


class AdapterSlots:
    """Forecast of when replicas have a slot for an adapter, from polls and this router's requests.

    Each request and each poll renews the replica's forecast. An adapter without requests gives its
    slot to the next waiting adapter. So the k-th waiting adapter gets a slot when k adapters, of
    those in the batch and those waiting before it, have no request left.
    """

    def __init__(
        self, table: Replicas, members: Mapping[str, int], ledger: Ledger, lengths: OutputLengths
    ) -> None:
        self._table = table
        self._members = members
        self._ledger = ledger
        self._lengths = lengths
        self._slots: dict[int, _Slots] = {}  # by row
        self._tickets: dict[int, tuple[int, str]] = {}  # row and adapter of requests in flight
        self._starts: defaultdict[str, dict[int, float]] = defaultdict(dict)
        """``_Slots.starts`` by adapter, then by row: a decision reads those of few adapters."""

    def clear(self, row: int) -> None:
        """Forgets a row's adapters: its replica restarted, or another replica gets the row."""
        self._set_starts(row, {})
        self._slots[row] = _Slots()
        self._table.adapter_at[row] = self._table.adapter_load_s[row] = 0.0

    def polled(self, row: int, state: ReplicaState, asked_at: float, now: float) -> None:
        """Updates the replica's adapters in use from a poll that was sent at ``asked_at``."""
        if not state.max_loras:
            return
        slots = self._slots[row]
        slots.count = min(state.max_loras, _MAX_SLOTS)
        # Uses that this router began or ended since the last poll may be newer than this poll.
        names, before = state.adapters_in_use[:_MAX_SLOTS], slots.polled_at
        polled = [name for name in names if slots.used_at.get(name, -inf) <= before]
        own = {name: tickets for name, tickets in slots.in_use.items() if tickets}
        slots.in_use = {name: own.get(name, set()) for name in (*polled, *own)}
        slots.used_at |= dict.fromkeys(polled, asked_at)
        slots.polled_at = asked_at
        self._table.adapter_load_s[row] = median(slots.loads)
        self._forecast(row, now)

    def sent(self, row: int, ticket: int, adapter: str, now: float) -> None:
        slots = self._slots[row]
        if adapter and slots.count:
            self._tickets[ticket] = row, adapter
            if not slots.in_use.get(adapter):
                slots.used_at[adapter] = now
            slots.in_use.setdefault(adapter, set()).add(ticket)
            self._forecast(row, now)

    def moved(self, ticket: int, row: int, now: float) -> None:
        _, adapter = self._tickets.get(ticket, (row, ""))
        self.ended(ticket, now)
        self.sent(row, ticket, adapter, now)

    def ended(self, ticket: int, now: float) -> None:
        row, adapter = self._tickets.pop(ticket, (-1, ""))
        if adapter and ticket in (tickets := self._slots[row].in_use.get(adapter, set())):
            slots = self._slots[row]
            tickets.remove(ticket)
            if not tickets:
                del slots.in_use[adapter]
                slots.used_at[adapter] = now
            self._forecast(row, now)

    def load_measured(self, replica: str, seconds: float) -> None:
        """Learns that a replica took ``seconds`` to load an adapter, by a late first token."""
        if (row := self._members.get(replica)) is not None:
            loads = self._slots[row].loads
            loads.append(max(seconds, 0.0))
            self._table.adapter_load_s[row] = median(loads)

    def times(self, view: FleetView, now: float) -> AdapterTimes:
        """Returns for each candidate how long a request waits for a slot, and how long its adapter
        loads."""
        table, rows = self._table, view.rows
        names = dict(zip(rows.tolist(), view.adapters, strict=True))
        starts = table.adapter_at.copy()
        for name in {*view.adapters}:
            for row, at in self._starts.get(name, {}).items():
                if names.get(row) == name:
                    starts[row] = at
        starts = starts[rows]
        wait = np.maximum(starts - now, 0.0)
        load = table.adapter_load_s[rows] * (starts > -inf)
        needed_again = np.exp(np.minimum(table.idle_adapter_at[rows] - now, 0.0) / _MEMORY_S)
        return AdapterTimes(wait, load, load * (view.batch + needed_again))

    def _forecast(self, row: int, now: float) -> None:
        slots, table = self._slots[row], self._table
        # No set, because it has no order: several adapters may share the time of a poll.
        idle = sorted(
            (name for name in slots.used_at if name not in slots.in_use),
            key=slots.used_at.__getitem__,
        )
        idle = idle[max(len(slots.used_at) - slots.count, 0) :]
        slots.used_at = {name: slots.used_at[name] for name in (*slots.in_use, *idle)}
        typical_s = self._lengths.mean
        typical_s *= table.decode_step.item(row) / table.tokens_per_step.item(row)
        requests = self._ledger.ends(row) if len(slots.in_use) >= slots.count else {}
        ends = [-inf] * slots.count  # when adapters give slots back, the earliest first
        starts = dict.fromkeys(("", *idle), -inf)  # "" stands for no adapter
        for place, (name, tickets) in enumerate(slots.in_use.items()):
            starts[name] = ends[place]
            left_s = max((requests.get(ticket, now) - now for ticket in tickets), default=typical_s)
            insort(ends, max(ends[place], now) + max(left_s, 0.0))
        self._set_starts(row, starts)
        table.adapter_at[row] = max(ends[len(slots.in_use)], now)
        is_full = len(slots.used_at) >= slots.count
        dropped_at = slots.used_at[idle[0]] if idle else now
        table.idle_adapter_at[row] = dropped_at if is_full else -inf

    def _set_starts(self, row: int, starts: dict[str, float]) -> None:
        slots = self._slots.setdefault(row, _Slots())
        for name in slots.starts:
            del self._starts[name][row]
            if not self._starts[name]:
                del self._starts[name]
        slots.starts = starts
        for name, at in starts.items():
            self._starts[name][row] = at
