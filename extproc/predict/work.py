"""How much of a replica a request takes, once that is as busy as it can be."""

from math import inf

from extproc.predict.completion import Prediction
from extproc.predict.inputs import FleetView
from extproc.request.profile import RequestProfile

FULL = 0.94
"""KV pressure from which on a replica can carry no other request: what it has is still growing."""


def work(profile: RequestProfile, prediction: Prediction, view: FleetView, at: int) -> float:
    """Seconds for which the request would keep the candidate ``at`` busy, all by itself.

    With u prompt tokens to prefill, o output tokens, d tokens a step and K KV tokens it holds on
    average, of which m are its own (those that were cached are shared)::

        work  = u·c_prefill + o/d·(share·c0 + c_batch + c_kv·K)
        share = m / (0.94·KV capacity), or 1 / places in the batch, whichever is more

    The work of requests that come in a second adds up to 1 where a replica can just do it: shares
    of a full batch add up to 1, so that each step's c0 is counted once. (That is the least a step
    costs, whoever is in it, so a request in an emptier batch takes more of a replica than this.)
    The stretch of decode times is not in it: most of that is others' prefill, which is their work.
    A target for each token, or for the end, needs quicker steps, in smaller batches: larger shares.
    """
    own, out = max(profile.sequences, 1), prediction.output_tokens
    prompt, later = float(profile.prompt_tokens), max(out - 1.0, 0.0)
    new = prompt - prediction.cached.item(at)
    prefill = new * view.c_prefill.item(at)
    step = view.c0.item(at)
    if not later:
        return prefill + step * new / view.token_budget.item(at)
    decoded = own * later / 2
    places, memory = view.max_num_seqs.item(at), FULL * view.kv_capacity.item(at)
    share = max((new + decoded) / memory, own / places)
    steps = later / view.tokens_per_step.item(at)
    rows = own * view.c_batch.item(at) + view.c_kv.item(at) * (prompt + decoded)
    objective = profile.objective
    longest = min(prefill + objective.tpot_s * later, objective.completion_s)
    if longest < inf:
        spare = longest - steps * step
        share = max(share, (steps * rows + prefill) / spare) if spare > 0.0 else 1.0
    return prefill + steps * (min(share, 1.0) * step + rows)
