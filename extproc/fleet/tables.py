"""Tables of a fleet: a row for each replica, and a row for each request in flight."""

from inspect import get_annotations
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extproc.fleet.digest import FIGURES, REQUESTS
from extproc.predict.inputs import Columns, Floats, Indices
from extproc.replica_state import STALE_AFTER_S

_FIRST_CAPACITY = 16
_LENGTHS_REMEMBERED = 64


class Table:
    """Table whose columns are the annotations of a subclass: ``Floats`` or ``Indices``.

    Each column is an attribute too: a view of rows 0…len−1, valid until rows are added or removed.
    All columns of a type are stored as the rows of one array, in the order of the annotations, so
    that one operation writes, moves or reads a row of the table. The capacity doubles when the
    table is full.
    """

    def __init__(self) -> None:
        classes = [get_annotations(base) for base in reversed(type(self).__mro__)]
        columns = [column for annotations in classes for column in annotations.items()]
        self._names = [
            [name for name, kind in columns if kind is Floats],
            [name for name, kind in columns if kind is Indices],
        ]
        self._columns = [*self._names[0], *self._names[1]]
        self._floats: Floats = np.zeros((len(self._names[0]), _FIRST_CAPACITY))
        self._indices: Indices = np.zeros((len(self._names[1]), _FIRST_CAPACITY), dtype=np.intp)
        self._views: dict[int, dict[str, NDArray[Any]]] = {}
        """Views of the columns, by number of rows: making all anew would take 3 µs per change."""
        self._resize(0)

    def __len__(self) -> int:
        return self._length

    def append(self, **values: float) -> int:
        """Adds a row and returns its index; ``values``: a value for each column in order, or no
        values for a row of zeros."""
        assert not values or [*values] == self._columns, "a value is missing, or out of order"
        row = self._length
        if row == self._floats.shape[1]:
            self._views.clear()
            self._floats = np.hstack([self._floats, np.zeros_like(self._floats)])
            self._indices = np.hstack([self._indices, np.zeros_like(self._indices)])
        self._resize(row + 1)
        figures, floats = [*values.values()], len(self._floats)
        self._floats[:, row] = figures[:floats] or 0.0
        self._indices[:, row] = figures[floats:] or 0
        return row

    def clear(self, row: int) -> None:
        self._floats[:, row] = 0.0
        self._indices[:, row] = 0

    def write(self, row: int, **values: float) -> None:
        columns = self.__dict__
        for name, value in values.items():
            columns[name][row] = value

    def drop(self, row: int) -> int:
        """Removes a row by moving the last row into its place; returns the last row's old index."""
        last = self._length - 1
        self._floats[:, row] = self._floats[:, last]
        self._indices[:, row] = self._indices[:, last]
        self._resize(last)
        return last

    def first(self, columns: int) -> Floats:
        return self._floats[:columns, : self._length]

    def _resize(self, length: int) -> None:
        self._length = length
        views = self._views.get(length)
        if views is None:
            if len(self._views) >= _LENGTHS_REMEMBERED:
                self._views.clear()
            floats, indices = self._names
            views = self._views[length] = {
                **dict(zip(floats, self._floats[:, :length], strict=True)),
                **dict(zip(indices, self._indices[:, :length], strict=True)),
            }
        self.__dict__.update(views)


class Replicas(Columns, Table):
    """Table of the replicas."""

    steps: Floats  # engine steps, as the replica counts them
    polled_steps: Floats  # engine steps at the last poll
    chunk: Floats  # prompt tokens in the prefill step in progress
    seen: Floats  # end of the last prompt whose first token this router observed
    prefilled_sent_at: Floats  # when the latest sequence known to be prefilled was sent
    decoding: Floats  # this router's sequences that decode
    held: Floats  # prompt tokens of the sequences counted in `decoding`
    reports: Floats  # 1: the replica reports the size of its KV cache, and its speed was measured
    profile_prefill: Floats  # seconds per prompt token, by its profile
    decode_slowness: Floats  # seconds of a usual step ÷ those of its profile; above 0
    sampled_at: Floats  # when the last poll's figures were taken
    block_size: Floats  # tokens in a KV block; only whole blocks can be in the prefix cache
    prefix_trust: Floats  # factor of the tokens that the prefix index expects, 0…1
    adapter_at: Floats  # when a further LoRA adapter would get a slot; a past time: now
    adapter_load_s: Floats  # seconds to load an adapter; 0: serves none, as far as known
    idle_adapter_at: Floats  # last use of the adapter that is evicted next; −∞: a slot is empty
    # Polled load beyond the requests of this router and of the peers that count; may be negative:
    unattributed: Floats  # sequences, at the last poll
    unattributed_before: Floats  # sequences, at the poll before
    kv_unattributed: Floats  # KV tokens, at the last poll

    def __init__(self) -> None:
        super().__init__()
        self.peers = np.zeros((FIGURES, 0))  # load of the peers that count, by figure and replica
        self.peers_count = False  # True: a peer counts

    @property
    def unattributed_figures(self) -> Floats:
        """View of the three unattributed columns as one array."""
        return self._floats[-3:, : self._length]

    def all_requests(self, row: int) -> float:
        """Returns the requests on a replica, of all routers and of other senders."""
        of_routers = self.requests.item(row) + self.peers.item(REQUESTS, row)
        return of_routers + self.external.item(row)

    def set_external(self) -> None:
        """Sets the external sequences: the part of the unattributed sequences that two consecutive
        polls reported, because a sequence that ended just after a scrape appears in one poll
        only."""
        both = np.minimum(self.unattributed, self.unattributed_before)
        np.maximum(both, 0.0, out=self.external)

    def drop_stale_load(self, now: float) -> None:
        """Drops the external load of replicas whose last poll is stale."""
        sampled_at = self.sampled_at
        if len(self) and now - sampled_at[sampled_at.argmin()] > STALE_AFTER_S:
            old = now - sampled_at > STALE_AFTER_S
            sampled_at[old] = inf  # so that this is done once
            self.unattributed_figures[:, old] = 0.0
            self.external[old] = self.external_backlog[old] = 0.0
            self.polled_waiting[old] = self.polled_kv_usage[old] = 0.0


class Requests(Table):
    """Table of the requests in flight."""

    weight: Floats  # sequences
    context: Floats  # KV tokens of each sequence, once the prompt is prefilled
    remaining: Floats  # tokens that a sequence is still expected to generate
    priority: Floats  # higher goes first
    # Policies read the columns above.
    generated: Floats  # tokens of a sequence so far
    sent_at: Floats
    prompt: Floats  # tokens to prefill
    each: Floats  # prompt tokens of one sequence
    prompt_end: Floats  # the prompt is prefilled once the replica's `prefilled` reaches this
    parts: Floats  # sequences as the engine counts them, with those that generate nothing
    steps_before: Floats  # the replica's step count before the first token; infinite until then
    began_at: Floats  # when the first token was counted
    bound: Floats  # most tokens that a sequence may generate
    least_output: Floats  # fewest tokens that a sequence will generate
    until: Floats  # generated tokens up to which `alive` is valid
    replica: Indices  # row of the replica
    ticket: Indices
    lengths: Indices  # index in the suffix sums at which the output length distribution begins
    alive: Indices  # index at which the distribution reaches the generated tokens
    cut: Indices  # index at which the distribution reaches the bound


POLICY_COLUMNS = [*Requests.__annotations__].index("generated")  # number of columns for policies


def count(replicas: Replicas, requests: Requests, row: int, sign: int) -> None:
    """Adds a request to the sums of its replica; ``sign`` −1 takes the request out.

    Updating the sums takes a microsecond whenever a request is added, starts to decode or ends.
    Computing them would take four passes over all requests at every decision.
    """
    on = requests.replica.item(row)
    replicas.requests[on] += sign
    if requests.steps_before.item(row) == inf:
        replicas.queued[on] += sign
        replicas.joining[on] += sign * requests.prompt.item(row)
    else:
        weight = sign * requests.weight.item(row)
        replicas.decoding[on] += weight
        replicas.held[on] += weight * requests.each.item(row)
