"""Which prompts are prefilled, as far as a poll tells."""

from math import inf

import numpy as np

from extproc.fleet.tables import Replicas, Requests
from extproc.predict.inputs import Floats, Indices
from extproc.replica_state import ReplicaState

_UNDER_WAY = 0.1
"""Seconds until a request that was sent reaches the engine: it is parsed and tokenized first."""
_TOKENIZED = 5e-6
"""The same for each token of its prompt."""


def correct_prefills(
    replicas: Replicas,
    requests: Requests,
    row: int,
    mine: Indices,
    state: ReplicaState,
    asked_at: float,
    now: float,
) -> None:
    """Moves the prompt tokens that the clock takes for prefilled to where the poll allows.

    A replica counts the sequences that got their first token, and prefills in the order they came.
    So of the router's own sequences, numbered in that order, it is known up to which one the
    prompts were prefilled when the poll was taken (the count is exact while nobody else sends
    there), and that the next one was not: the clock may be ahead by the prompt in progress or, if
    that is more, by a step. Beside others' requests only the replica's queue tells: those it has
    admitted are prefilled but for the last prompt, or a step's worth, and those beyond what others
    sent are not.

    Args:
        replicas: the table.
        requests: the table.
        row: the replica's.
        mine: rows of its requests.
        state: what the poll saw.
        asked_at: when the poll was asked for; it tells nothing of what was sent since.
        now: seconds.
    """
    order = mine[requests.turn[mine].argsort()]
    turn = requests.turn[order]
    settled = order[: _settled(replicas, requests, row, order, asked_at)]
    told = state.first_tokens > 0 or state.generated_tokens == 0
    theirs = replicas.others_requests.item(row) + replicas.foreign.item(row)
    queued = max(state.waiting - theirs, 0.0)
    counted = _count(replicas, requests, row, order, state, queued, told and not theirs)
    budget = replicas.token_budget.item(row)
    admitted = _admitted(requests, settled, state, budget)
    surely = order[requests.mark[order] <= admitted]
    if len(surely) and requests.turn[surely[-1]] > counted:  # some were given up, and never counted
        counted = replicas.begun[row] = requests.turn.item(surely[-1])

    ahead = order[turn > counted]
    prefilled, enqueued = replicas.prefilled.item(row), replicas.enqueued.item(row)
    if not len(ahead):
        replicas.prefilled[row] = enqueued
        return
    first = ahead[0]
    start, end = requests.mark.item(first) - requests.prompt.item(first), requests.mark.item(first)
    least, most = max(start, admitted), inf
    if told and (queued or not theirs) and requests.sent_at[first] <= asked_at:
        most = max(end, start + budget, least) + _rate(replicas, row) * (now - asked_at)
    replicas.prefilled[row] = min(max(prefilled, least), most, enqueued)


def _count(
    replicas: Replicas,
    requests: Requests,
    row: int,
    order: Indices,
    state: ReplicaState,
    queued: float,
    alone: bool,
) -> float:
    """The number of the last sequence that has its first token.

    ``queued``: those of the router's own that the replica has not admitted, or preempted.
    """
    known = replicas.known.item(row)
    firsts = state.first_tokens - replicas.polled_firsts.item(row)
    replicas.polled_firsts[row] = state.first_tokens
    if firsts < 0.0:  # another process
        firsts = state.first_tokens
    if alone:
        # What was seen before the poll before is in the counts; what was seen since may not be.
        begun = max(replicas.begun.item(row) + firsts, replicas.known_before.item(row))
    else:
        started = order[requests.before[order] < inf]
        begun = max(known, requests.turn.item(started[-1]) if len(started) else 0.0)
    begun = replicas.begun[row] = min(begun, replicas.sent.item(row) - queued)
    replicas.known_before[row] = known
    # Of several engines each has a queue of its own: one that has a token may have overtaken.
    return begun if state.engines > 1 else max(begun, known)


def _admitted(requests: Requests, settled: Indices, state: ReplicaState, budget: float) -> float:
    """Up to where the prompts must be prefilled that are not in the replica's queue any more."""
    turns: Floats = requests.turn[settled]
    most = turns[-1] - state.waiting if len(settled) else 0.0
    admitted = settled[: int(turns.searchsorted(most, "right"))]
    if not len(admitted):
        return 0.0
    last = admitted[-1]
    under_way = max(budget, requests.prompt.item(last)) if state.running else 0.0
    return requests.mark.item(last) - under_way


def _settled(
    replicas: Replicas, requests: Requests, row: int, order: Indices, asked_at: float
) -> int:
    """How many of them, the first ones, were surely among those running or waiting: vLLM says at
    the end of each step what was there when it began."""
    budget = replicas.token_budget.item(row)
    step = replicas.decode_step.item(row) + replicas.c_prefill.item(row) * budget
    prompts = requests.each[order] * np.maximum(requests.weight[order], 1.0)
    arrived_at = requests.sent_at[order] + _TOKENIZED * prompts
    late = (arrived_at > asked_at - _UNDER_WAY - 2.0 * step).nonzero()[0]
    return int(late[0]) if len(late) else len(order)


def _rate(replicas: Replicas, row: int) -> float:
    """Prompt tokens prefilled a second."""
    chunk = replicas.chunk.item(row)
    step = replicas.decode_step.item(row) + replicas.c_prefill.item(row) * chunk
    return chunk / step
