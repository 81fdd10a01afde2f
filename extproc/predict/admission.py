"""How long a request waits before a replica admits it."""

import numpy as np

from extproc.predict.inputs import FleetView, Floats, Indices, Sequences, least, most


def admission(view: FleetView, sequences: Sequences, own: int, new: Floats | float) -> Floats:
    """Seconds until the sequences in flight have freed the KV tokens and places it needs.

    vLLM admits a prompt only when all of it fits, after those queued before it.

    Args:
        view: the candidates.
        sequences: what is in flight on them.
        own: places that the request needs.
        new: KV tokens that it needs, on each candidate.
    """
    wait = np.zeros(len(view))
    missing = new - (view.kv_capacity - view.taken)
    places = view.max_num_seqs - view.batch - view.waiting
    if most(missing) <= 0.0 and least(places) >= own:
        return wait
    here = ((missing > 0.0) | (places < own))[sequences.replica].nonzero()[0]
    if not len(here):
        return wait
    # By replica, and of each the first to end first.
    here = here[np.lexsort((sequences.remaining[here], sequences.replica[here]))]
    weight, remaining = sequences.weight[here], sequences.remaining[here]
    on = sequences.replica[here]
    borders = (on[1:] != on[:-1]).nonzero()[0] + 1
    first, end = np.concatenate([[0], borders]), np.concatenate([borders, [len(on)]])
    full = on[first]
    freed = weight * (sequences.context[here] + remaining)
    last = np.maximum(
        _reaching(freed, first, missing[full]), _reaching(weight, first, own - places[full])
    )
    token = view.decode_step[full] / view.tokens_per_step[full]
    wait[full] = remaining[np.minimum(last, end - 1)] * token
    return wait


def _reaching(amounts: Floats, first: Indices, wanted: Floats) -> Indices:
    """With which of the amounts that begin at each of ``first`` their sum gets to what is wanted
    there."""
    sums = amounts.cumsum()
    before = sums[first] - amounts[first]
    return np.maximum(sums.searchsorted(before + wanted), first)
