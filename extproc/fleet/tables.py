"""The two tables of a fleet: a row a replica, a row a request in flight."""

from math import inf

from extproc.fleet.digest import FIGURES
from extproc.fleet.table import Table
from extproc.predict.inputs import Floats, Indices

COSTS = ("c0", "c_prefill", "c_batch", "c_kv", "c_att", "frontend")
"""Coefficients of the step-time model."""


class Replicas(Table):
    """A row a replica."""

    requests: Floats  # in this router's ledger
    queued: Floats  # of these, without a token yet
    enqueued: Floats  # prompt tokens sent, in all
    prefilled: Floats  # of these, prefilled
    foreign: Floats  # sequences that two polls in a row saw and no router told of
    foreign_backlog: Floats  # prompt tokens of those of them that the replica has not admitted
    polled_waiting: Floats  # requests in the replica's queue
    polled_kv_usage: Floats  # fraction of its KV cache in use, as it says
    batch: Floats  # sequences decoding
    kv_used: Floats  # KV tokens of the sequences decoding
    kv_capacity: Floats
    token_budget: Floats
    max_num_seqs: Floats
    longest_prompt: Floats  # tokens that its context and its KV cache can hold
    decode_step: Floats  # seconds of a step that only decodes
    tokens_per_step: Floats  # that a sequence gets; more than one where they are drafted
    stretch: Floats  # actual ÷ predicted decode time
    c0: Floats
    c_prefill: Floats
    c_batch: Floats
    c_kv: Floats
    c_att: Floats
    frontend: Floats
    # A view is made of those above.
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
    beyond: Floats  # sequences the last poll saw beyond the router's own and others' digests
    kv_beyond: Floats  # KV tokens beyond the estimate by the same; may be negative
    sampled_at: Floats  # when the last poll's figures were taken
    # What other routers have there, by their digests and while these count:
    others_requests: Floats
    others_queued: Floats
    others_joining: Floats
    others_backlog: Floats
    others_decoding: Floats
    others_kv: Floats
    others_decoded: Floats
    others_expected: Floats
    others_parts: Floats

    @property
    def others(self) -> Floats:
        """The columns of other routers, as the rows of one array."""
        return self._floats[-len(FIGURES) :, : self._length]


IN_VIEW = [*Replicas.__annotations__].index("steps")
"""Columns of replicas that a view is made of: the first ones."""


class Requests(Table):
    """A row a request in flight."""

    weight: Floats  # sequences
    context: Floats  # KV tokens of each, once its prompt is prefilled
    remaining: Floats  # tokens a sequence is expected to generate still
    # What policies see are those above.
    generated: Floats  # tokens a sequence has so far
    sent_at: Floats
    prompt: Floats  # tokens to prefill
    each: Floats  # prompt tokens of one sequence
    mark: Floats  # its prompt is prefilled once the replica's `prefilled` gets here
    parts: Floats  # sequences as the engine counts them: those that generate nothing, too
    turn: Floats  # its sequences have a first token once the replica's `begun` gets here
    before: Floats  # the replica's step count before the first token's; infinite until then
    bound: Floats  # tokens a sequence may generate
    least: Floats  # tokens it will generate at least
    until: Floats  # tokens generated up to which `alive` holds
    replica: Indices  # row of the replica
    ticket: Indices
    lengths: Indices  # where the output length distribution begins
    alive: Indices  # where it reaches the tokens generated
    cut: Indices  # where it reaches the bound


SEEN = [*Requests.__annotations__].index("generated")
"""Columns of requests that policies see: the first ones."""


def count(replicas: Replicas, requests: Requests, row: int, sign: int) -> None:
    """Counts a request among those of its replica, or no more where ``sign`` is −1.

    Sums that only change when a request comes, starts to decode or goes cost a microsecond each
    time instead of four passes over all requests at every decision.
    """
    on = requests.replica.item(row)
    replicas.requests[on] += sign
    if requests.before.item(row) == inf:
        replicas.queued[on] += sign
    else:
        weight = sign * requests.weight.item(row)
        replicas.decoding[on] += weight
        replicas.held[on] += weight * requests.each.item(row)
