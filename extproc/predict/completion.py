"""When each replica would finish a request, over the whole fleet in one expression."""

from dataclasses import dataclass

import numpy as np

from extproc.fleet.view import FleetView, Floats
from extproc.request.profile import RequestProfile


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times in seconds, one entry of each array a candidate of the view."""

    output_tokens: float
    """Tokens a sequence of the request is expected to generate."""
    step_rest: Floats
    """Rest of the step in progress."""
    admission: Floats
    """Wait until enough KV space and a place in the batch are free."""
    prefill: Floats
    """Prefill of the queue ahead and of the prompt itself."""
    decode: Floats
    """From the first token to the last."""
    cost_to_others: Floats
    """Time the requests in flight lose, summed over them."""
    kv_pressure: Floats
    """Fraction of the KV cache in use after admission, 0…1."""

    @property
    def ttft(self) -> Floats:
        """Time to first token."""
        first: Floats = self.step_rest + self.admission + self.prefill
        return first

    @property
    def completion(self) -> Floats:
        """Time to the last token."""
        last: Floats = self.ttft + self.decode
        return last


def predict(profile: RequestProfile, output_tokens: float, view: FleetView) -> Prediction:
    """Predicts a request on every candidate.

    With p prompt tokens and an expected output of o tokens a sequence, a backlog of W prompt
    tokens, B sequences decoding and K KV tokens, and sequences i with context k_i and expected
    remainder r_i, m_i = min(r_i, o)::

        T_first  = rest of step + admission + (W + p)·c_prefill + ceil((W + p)/budget)·step(0, B, K)
        T_decode = o·c0 + c_batch·(o + Σ m_i) + c_kv·(Σ m_i·(k_i + m_i/2) + o·p + o²/2)
        cost     = B·p·c_prefill + Σ m_i·(c_batch + c_kv·(p + m_i/2))

    Two sequences about to finish cost next to nothing; one long one costs for the whole way.
    """
    costs, sequences = view.costs, view.sequences
    own = max(profile.sequences, 1)
    prompt, each = float(profile.prompt_tokens), profile.prompt_tokens / own
    out = float(output_tokens)

    queue = view.backlog + prompt
    pure_step = costs.step_time(0.0, view.batch, view.kv_used)
    prefill_steps = np.ceil(np.maximum(queue, 1.0) / view.token_budget)
    prefill = queue * costs.c_prefill + prefill_steps * pure_step + costs.c_att * prompt**2 / 2
    busy = (view.batch > 0) & (view.backlog <= 0)

    together = np.minimum(sequences.remaining, out)
    shared = together * sequences.weight
    shared_kv = shared * (sequences.context + together / 2)
    steps_beside = _per_replica(view, shared)
    kv_beside = _per_replica(view, shared_kv)
    later = max(out - 1.0, 0.0)
    # The first token comes out of the prefill; `later` decode steps follow.
    share = later / out if out else 0.0
    decode = (
        later * costs.c0
        + costs.c_batch * (own * later + share * steps_beside)
        + costs.c_kv * (share * kv_beside + own * (later * each + later**2 / 2))
    )
    slowed = own * (costs.c_batch + costs.c_kv * each) * steps_beside
    slowed += own * costs.c_kv * _per_replica(view, shared * together / 2)

    used = view.kv_used + view.backlog
    return Prediction(
        output_tokens=out,
        step_rest=np.where(busy, pure_step / 2, 0.0),
        admission=_admission(profile, view, pure_step),
        prefill=prefill,
        decode=decode,
        cost_to_others=view.batch * prompt * costs.c_prefill + slowed,
        kv_pressure=np.clip((used + prompt + own * out) / view.kv_capacity, 0.0, 1.0),
    )


def _per_replica(view: FleetView, values: Floats) -> Floats:
    sums: Floats = np.bincount(view.sequences.replica, values, minlength=len(view)).astype(float)
    return sums


def _admission(profile: RequestProfile, view: FleetView, step: Floats) -> Floats:
    """Seconds until the sequences in flight have freed the KV tokens and places it needs.

    vLLM admits a prompt only when all of it fits, after those queued before it.
    """
    wait = np.zeros(len(view))
    lacking = view.kv_used + view.backlog + profile.prompt_tokens - view.kv_capacity
    excess = view.batch + view.waiting + max(profile.sequences, 1) - view.max_num_seqs
    for index in np.flatnonzero((lacking > 0) | (excess > 0)):
        here = np.flatnonzero(view.sequences.replica == index)
        here = here[np.argsort(view.sequences.remaining[here])]
        weight = view.sequences.weight[here]
        remaining = view.sequences.remaining[here]
        freed = np.cumsum(weight * (view.sequences.context[here] + remaining))
        ended = np.cumsum(weight)
        last = max(np.searchsorted(freed, lacking[index]), np.searchsorted(ended, excess[index]))
        if len(here):
            wait[index] = remaining[min(last, len(here) - 1)] * step[index]
    return wait
