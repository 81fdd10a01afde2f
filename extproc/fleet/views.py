"""Candidates of a decision with their figures, and the sequences in flight on them."""

from math import inf

import numpy as np

from extproc.fleet.digest import (
    BACKLOG,
    DECODING,
    KV,
    QUEUED,
    QUEUED_SEQUENCES,
    REMAINING,
    REQUESTS,
)
from extproc.fleet.tables import POLICY_COLUMNS, Replicas, Requests
from extproc.predict.inputs import Candidates, Columns, FleetView, Floats, Indices, Sequences
from extproc.predict.lengths import OutputLengths

_VIEW_COLUMNS = [*Columns.__annotations__]


def view_of(
    candidates: Candidates, table: Replicas, outside_steps: tuple[float, float, float]
) -> FleetView:
    """Returns the candidates with their figures. ``outside_steps``: as in the view."""
    rows, figures = candidates.rows, table.first(len(_VIEW_COLUMNS))
    figures = figures.copy() if len(rows) == len(table) else figures.take(rows, axis=1)
    view = FleetView(candidates, zip(_VIEW_COLUMNS, figures, strict=True))
    view.outside_steps = outside_steps
    view.taken = view.kv_used + view.joining + view.external_backlog
    if table.peers_count:
        view.requests += table.peers[REQUESTS][rows]
        view.queued += table.peers[QUEUED][rows]
        view.enqueued += table.peers[BACKLOG][rows]
        view.taken += table.peers[BACKLOG][rows]
    view.requests += view.external
    view.waiting = np.maximum(view.queued, view.polled_waiting)
    view.backlog = view.enqueued - view.prefilled + view.external_backlog
    return view


def sequences_on(
    view: FleetView, table: Replicas, requests: Requests, lengths: OutputLengths
) -> Sequences:
    """Returns the sequences in flight on the candidates.

    Besides the ledger's sequences, each replica has one entry for the sequences of all peers, and
    one for external sequences, which are expected to end by the learned output ``lengths``.
    """
    rows = view.rows
    on, figures = requests.replica, requests.first(POLICY_COLUMNS)
    if len(rows) < len(table):
        candidate = np.full(len(table), -1, dtype=np.intp)
        candidate[rows] = np.arange(len(rows))
        on = candidate[on]
        keep = (on >= 0).nonzero()[0]
        on, figures = on[keep], figures.take(keep, axis=1)
    if table.peers_count:
        weight = (table.peers[QUEUED_SEQUENCES] + table.peers[DECODING])[rows]
        there = weight.nonzero()[0]
        tokens = (table.peers[KV] + table.peers[BACKLOG])[rows]
        remaining = table.peers[REMAINING][rows[there]] / weight[there]
        on, figures = _beside(on, figures, there, weight, tokens, remaining)
    there = view.external.nonzero()[0]
    if len(there):
        tokens = np.maximum(table.kv_unattributed[rows], 0.0)
        on, figures = _beside(on, figures, there, view.external, tokens, lengths.mean)
    return Sequences(on, *figures)


def _beside(
    on: Indices,
    figures: Floats,
    there: Indices,
    weight: Floats,
    tokens: Floats,
    remaining: Floats | float,
) -> tuple[Indices, Floats]:
    """Adds to the columns of :class:`Sequences` an entry for each candidate on which other senders
    have sequences. Their priority is not known, so it is infinite: no request preempts them.

    Args:
        on: the column ``replica``.
        figures: the other columns, as rows of one array.
        there: candidates to add an entry for.
        weight: sequences to add, for each candidate.
        tokens: KV tokens of these sequences together, for each candidate.
        remaining: tokens that each of the sequences will still generate, for each entry.
    """
    added = np.empty((POLICY_COLUMNS, len(there)))
    added[0] = weight = weight[there]
    added[1] = tokens[there] / weight
    added[2] = remaining
    added[3] = inf
    return np.concatenate((on, there)), np.concatenate((figures, added), axis=1)
