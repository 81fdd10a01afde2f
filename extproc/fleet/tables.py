"""The two tables of a fleet: a row a replica, a row a request in flight."""

import numpy as np

from extproc.fleet.table import Table

COSTS = ("c0", "c_prefill", "c_batch", "c_kv", "c_att")
"""Coefficients of the step-time model."""

_REPLICA: dict[str, type] = {
    "steps": np.float64,  # engine steps, as the replica counts them
    "polled_steps": np.float64,  # the last count a poll gave
    "enqueued": np.float64,  # prompt tokens sent, in all
    "prefilled": np.float64,  # of these, prefilled
    "chunk": np.float64,  # prompt tokens in the prefill step in progress
    "requests": np.float64,  # in this router's ledger
    "batch": np.float64,  # sequences decoding
    "kv_used": np.float64,  # KV tokens of the sequences decoding
    "decode_step": np.float64,  # seconds of a step that only decodes
    "stretch": np.float64,  # actual ÷ predicted decode time
    "beyond": np.float64,  # sequences the last poll saw beyond the router's own
    "foreign": np.float64,  # those two polls in a row saw: somebody else's
    "kv_beyond": np.float64,  # KV tokens beyond the router's own estimate; may be negative
    "polled_waiting": np.float64,  # requests in the replica's queue
    "sampled_at": np.float64,  # when the last poll's figures were taken
    "heard_at": np.float64,  # when the last poll's news came
    **dict.fromkeys(COSTS, np.float64),
    "kv_capacity": np.float64,
    "token_budget": np.float64,
    "max_num_seqs": np.float64,
}

_REQUEST: dict[str, type] = {
    "replica": np.intp,  # row of the replica
    "ticket": np.int64,
    "sent_at": np.float64,
    "prompt": np.float64,  # tokens
    "mark": np.float64,  # its prompt is prefilled once the replica's `prefilled` gets here
    "first_step": np.float64,  # the replica's step count at its first token; infinite before
    "generated": np.float64,  # tokens a sequence has so far
    "remaining": np.float64,  # tokens a sequence is expected to generate still
    "weight": np.float64,  # sequences
    "bound": np.float64,  # tokens a sequence may generate
    "least": np.float64,  # tokens it will generate at least
    "lengths": np.intp,  # row of the output length distribution
}


def replica_table() -> Table:
    """An empty table of replicas."""
    return Table(_REPLICA)


def request_table() -> Table:
    """An empty table of requests in flight."""
    return Table(_REQUEST)
