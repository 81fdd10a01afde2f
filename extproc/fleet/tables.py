"""The two tables of a fleet, a row a replica and a row a request in flight; and how tables grow."""

from collections.abc import Iterable
from inspect import get_annotations
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extproc.fleet.digest import FIGURES
from extproc.predict.inputs import Columns, Floats, Indices

_FIRST_CAPACITY = 16
_LENGTHS_REMEMBERED = 64

COSTS = ("c0", "c_prefill", "c_batch", "c_kv")
"""Coefficients of the step-time model that the router knows."""


class Table:
    """Rows 0…len−1 of the columns that a subclass names, whose capacity doubles when it is full.

    A column is an annotation, ``Floats`` or ``Indices``, and an attribute: a view until rows come
    or go, and writing to it writes to the table. Columns of a kind are the rows of one array, in
    the order they are named, so that a thing is written, moved and read in one go.
    """

    def __init__(self) -> None:
        classes = [get_annotations(one) for one in reversed(type(self).__mro__)]
        kinds = [kind for named in classes for kind in named.items()]
        self._names = [
            [name for name, kind in kinds if kind is Floats],
            [name for name, kind in kinds if kind is Indices],
        ]
        self._floats: Floats = np.zeros((len(self._names[0]), _FIRST_CAPACITY))
        self._indices: Indices = np.zeros((len(self._names[1]), _FIRST_CAPACITY), dtype=np.intp)
        self._views: dict[int, dict[str, NDArray[Any]]] = {}
        """By length: rows come and go all the time, and to make 17 views anew takes 3 µs."""
        self._resize(0)

    def __len__(self) -> int:
        return self._length

    def append(self, **values: float) -> int:
        """Adds a row, zero where no value is given, and returns its index."""
        row = self._length
        if row == self._floats.shape[1]:
            self._views.clear()
            self._floats = np.hstack([self._floats, np.zeros_like(self._floats)])
            self._indices = np.hstack([self._indices, np.zeros_like(self._indices)])
        self._resize(row + 1)
        self.write(row, **values)
        return row

    def write(self, row: int, **values: float) -> None:
        self._floats[:, row] = 0.0
        self._indices[:, row] = 0
        columns = self.__dict__
        for name, value in values.items():
            columns[name][row] = value

    def drop(self, row: int) -> int:
        """Removes a row by moving the last one into its place; returns the row it moved from."""
        last = self._length - 1
        self._floats[:, row] = self._floats[:, last]
        self._indices[:, row] = self._indices[:, last]
        self._resize(last)
        return last

    def first(self, columns: int) -> Floats:
        return self._floats[:columns, : self._length]

    def copy(self, columns: int, rows: Indices | None = None) -> Iterable[tuple[str, Floats]]:
        """Names and figures of the first so many columns; of these rows alone, if given."""
        floats = self._floats[:columns, : self._length]
        floats = floats.copy() if rows is None else floats.take(rows, axis=1)
        return zip(self._names[0], floats, strict=False)

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
    """A row a replica."""

    steps: Floats  # engine steps, as the replica counts them
    polled_steps: Floats  # the last count a poll gave
    chunk: Floats  # prompt tokens in the prefill step in progress
    sent: Floats  # sequences sent, in all, as the engine counts them
    begun: Floats  # of these, with a first token, as polls count
    known: Floats  # of these, with a first token that was seen, they or one sent after them
    known_before: Floats  # the same, at the last poll
    polled_firsts: Floats  # first tokens, as the replica counted them at the last poll
    decoding: Floats  # sequences of the router's own that decode
    held: Floats  # their prompt tokens
    tells: Floats  # 1: it tells the size of its KV cache, and its speed was measured
    sampled_at: Floats  # when the last poll's figures were taken
    adapter_at: Floats  # when another LoRA adapter gets a slot; in the past: now
    adapter_load_s: Floats  # to load it; 0: not known to serve any
    idle_adapter_at: Floats  # last use of the adapter that is dropped for it; −∞: a slot is empty
    # What polls saw beyond the router's own requests and those of the peers that count; may be
    # negative:
    unattributed: Floats  # sequences, at the last poll
    unattributed_before: Floats  # sequences, at the poll before
    kv_unattributed: Floats  # KV tokens, at the last poll
    # What the peers that count have there:
    peers_requests: Floats
    peers_queued: Floats
    peers_joining: Floats
    peers_backlog: Floats
    peers_decoding: Floats
    peers_kv: Floats
    peers_remaining: Floats
    peers_decoded: Floats
    peers_expected: Floats
    peers_parts: Floats

    @property
    def prefilling(self) -> Floats:
        """KV tokens of the router's own prompts that are prefilled in part."""
        return self.joining - (self.enqueued - self.prefilled)

    @property
    def peers(self) -> Floats:
        """The columns of the peers, as the rows of one array."""
        return self._floats[-FIGURES:, : self._length]

    @property
    def unattributed_figures(self) -> Floats:
        """The columns before those, likewise."""
        return self._floats[-FIGURES - 3 : -FIGURES, : self._length]

    def set_external(self) -> None:
        """A sequence is external once two polls in a row saw it: one that ended between the scrape
        and now is seen by one poll only."""
        both = np.minimum(self.unattributed, self.unattributed_before)
        np.maximum(both, 0.0, out=self.external)


class Requests(Table):
    """A row a request in flight."""

    weight: Floats  # sequences
    context: Floats  # KV tokens of each, once its prompt is prefilled
    remaining: Floats  # tokens a sequence is expected to generate still
    priority: Floats  # the higher goes first
    # What policies see are those above.
    generated: Floats  # tokens a sequence has so far
    sent_at: Floats
    prompt: Floats  # tokens to prefill
    each: Floats  # prompt tokens of one sequence
    prompt_end: Floats  # its prompt is prefilled once the replica's `prefilled` gets here
    parts: Floats  # sequences as the engine counts them: those that generate nothing, too
    turn: Floats  # its sequences have a first token once the replica's `begun` gets here
    steps_before: Floats  # the replica's step count before the first token's; infinite until then
    began_at: Floats  # when that was, once it is counted
    bound: Floats  # tokens a sequence may generate
    least_output: Floats  # tokens it will generate at least
    until: Floats  # tokens generated up to which `alive` holds
    replica: Indices  # row of the replica
    ticket: Indices
    lengths: Indices  # where the output length distribution begins
    alive: Indices  # where it reaches the tokens generated
    cut: Indices  # where it reaches the bound


SEEN = [*Requests.__annotations__].index("generated")  # first columns, which policies see


def count(replicas: Replicas, requests: Requests, row: int, sign: int) -> None:
    """Counts a request among those of its replica, or no more where ``sign`` is −1.

    Sums that only change when a request comes, starts to decode or goes cost a microsecond each
    time instead of four passes over all requests at every decision.
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
