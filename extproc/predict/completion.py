"""When each replica would finish a request, over the whole fleet in one expression."""

from dataclasses import dataclass
from math import inf
from typing import cast

import numpy as np

from extproc.predict.inputs import FleetView, Floats, Indices, Sequences, least, most
from extproc.request.profile import RequestProfile


@dataclass(slots=True)
class Prediction:
    """Predicted times in seconds, one entry of each array a candidate of the view."""

    output_tokens: float  # tokens a sequence of the request is expected to generate
    admission: Floats  # wait until enough KV space and a place in the batch are free
    prefill: Floats  # of the queue ahead and of the prompt, and what passes beside the steps
    outside_steps: Floats  # of that, what passes beside the engine's steps
    decode: Floats  # from the first token to the last
    ttft: Floats  # time to first token: the first two, and that of the adapter
    completion: Floats  # time to the last token
    cost_to_others: Floats  # time the requests in flight lose, summed over them
    kv_pressure: Floats  # fraction of the KV cache in use after admission and preemption, 0…1
    growth: Floats  # tokens that those sequences in flight generate meanwhile
    cached: Floats  # tokens of the prompt that the replica has in its prefix cache
    avoidable: Floats
    """Time to prefill what another candidate has in its prefix cache: once for each request that
    waits for it, and once for the cache that it displaces. With a LoRA adapter, also what others
    lose by its load and its place (:func:`~extproc.predict.completion.add_adapter`)."""

    first_token_matters: bool  # the answer is streamed, or has a target for its first token
    first_token_share: float  # time to first token in the completion, at the soonest, 0…1
    adapter: Floats  # wait for a place of its LoRA adapter in the batch, and for its load
    queue: Floats  # expected wait at the router; 0 where the replica can start the request now
    preemptible: Floats | None  # KV tokens preempted before it; None: no candidate goes by priority

    @property
    def cost_weight(self) -> Floats:
        """How much the cost to others counts, 0…1 (:class:`~extproc.route.policies.completion`).

        All of it where the first token does not matter. Else the square of the KV pressure or,
        where that is more, the time to first token ÷ that of decoding, at the soonest.
        """
        if not self.first_token_matters:
            return np.ones(len(self.kv_pressure))
        share = self.first_token_share
        return np.maximum(self.kv_pressure**2, share / (1.0 - share) if share < 0.5 else 1.0)


def predict(
    profile: RequestProfile,
    output_tokens: float,
    view: FleetView,
    sequences: Sequences,
    held: Floats,
) -> Prediction:
    """Predicts a request on every candidate.

    With p prompt tokens, of which h are cached, and u = p − h to prefill, an expected output of o
    tokens a sequence, a backlog of W prompt tokens, B sequences decoding and K KV tokens, and
    sequences i with context k_i and expected remainder r_i, m_i = min(r_i, o)::

        T_first   = admission + (W + u)·c_prefill
                    + ceil((W + u)/budget)·step(0, B, K)
                    + x·step + y + z·p
        T_decode  = s/d·(o·c0 + c_batch·(o + Σ m_i) + c_kv·(Σ m_i·(k_i + m_i/2) + o·p + o²/2))
        cost      = B·u·c_prefill + Σ m_i·(c_batch + c_kv·(p + m_i/2))/d
        avoidable = (u − least u of all candidates)·c_prefill·(B + 1)

    s being actual ÷ predicted decode time of the replica, as of late
    (:class:`~extproc.predict.correction.Corrections`), d the tokens that a sequence gets from a
    step, and x, y and z what passes beside the steps
    (:class:`~extproc.predict.correction.FirstTokens`).

    Where a replica goes by priority, W and the queue that the admission waits for have none of a
    lower priority, and the KV pressure is that beside sequences of the same and of higher ones: the
    others are preempted first. They give no room for the admission itself.

    Two sequences about to finish cost next to nothing; one long one costs for the whole way.

    Args:
        profile: the request.
        output_tokens: a sequence of it is expected to generate.
        view: the candidates.
        sequences: what is in flight on them.
        held: tokens of the prompt that each should hold in its prefix cache; one token at least is
            computed all the same.
    """
    own = max(profile.sequences, 1)
    prompt, out = float(profile.prompt_tokens), float(output_tokens)
    new: Floats | float = prompt
    cached = avoidable = held
    if most(held) > 0.0:
        cached = np.minimum(held, prompt - 1.0)
        new = prompt - cached
        avoidable = (new - least(new)) * (view.c_prefill * (view.batch + 1.0))
    wait = admission(view, sequences, own, new)
    _refuse(view, profile.longest_prompt, wait)
    outside_steps = _outside_steps(view, prompt)
    prefill = _prefill(view, prompt, new) + outside_steps
    decode, slower, growth = _decode(view, sequences, own, prompt, out)
    ttft = wait + prefill
    completion = ttft + decode
    taken, preemptible = view.taken, None
    if most(view.by_priority) > 0.0:
        preemptible, preempted_growth = _preemptible(profile.priority, view, sequences, out)
        taken = np.maximum(taken + view.overtaken - preemptible, 0.0)
        growth = growth - preempted_growth
    kv_pressure = np.minimum((taken + (new + own * out)) / view.kv_capacity, 1.0)
    return Prediction(
        out,
        wait,
        prefill,
        outside_steps,
        decode,
        ttft,
        completion,
        view.c_prefill * new * view.batch + slower,
        kv_pressure,
        growth,
        cached,
        avoidable,
        profile.stream or profile.objective.ttft_s < inf,
        least(ttft) / least(completion),
        np.zeros(len(view)),
        np.zeros(len(view)),
        preemptible,
    )


def _refuse(view: FleetView, prompt: float, wait: Floats) -> None:
    """The wait is infinite where no prompt that long can be held, unless that is everywhere."""
    if least(view.longest_prompt) < prompt:
        too_long = view.longest_prompt < prompt
        if not too_long.all():
            wait[too_long] = np.inf


def backlog_s(view: FleetView) -> Floats:
    """Seconds until what is queued on each candidate is prefilled."""
    return _prefill_steps(view, view.backlog, np.ceil(view.backlog / view.token_budget))


def _prefill(view: FleetView, prompt: float, new: Floats | float) -> Floats:
    queue = view.backlog + new
    steps = np.ceil(queue / view.token_budget)
    if not prompt:
        steps = np.maximum(steps, 1.0)
    return _prefill_steps(view, queue, steps)


def _outside_steps(view: FleetView, prompt: float) -> Floats:
    """Seconds before a first token that no step shows."""
    each_step, request, token = view.outside_steps
    return each_step * view.decode_step + (request + token * prompt)


def _prefill_steps(view: FleetView, tokens: Floats, steps: Floats) -> Floats:
    seconds: Floats = tokens * view.c_prefill + steps * view.decode_step
    return seconds


def _preemptible(
    priority: int, view: FleetView, sequences: Sequences, out: float
) -> tuple[Floats, Floats]:
    """KV tokens of the sequences that are preempted before this one, and what they generate."""
    on, count = sequences.replica, len(view)
    lower = ((sequences.priority < priority) & (view.by_priority[on] > 0.0)).nonzero()[0]
    on, weight = on[lower], sequences.weight[lower]
    together = np.minimum(sequences.remaining[lower], max(out - 1.0, 0.0))
    held = cast(Floats, np.bincount(on, weight * sequences.context[lower], count))
    return held, cast(Floats, np.bincount(on, weight * together, count))


def _decode(
    view: FleetView, sequences: Sequences, own: int, prompt: float, out: float
) -> tuple[Floats, Floats, Floats]:
    """Decode time, what the sequences in flight lose by it, and the tokens they generate."""
    count = len(view)
    # The first token comes out of the prefill; `later` decode steps follow.
    later, each = max(out - 1.0, 0.0), prompt / own
    on, together = sequences.replica, np.minimum(sequences.remaining, later)
    shared = together * sequences.weight
    steps = cast(Floats, np.bincount(on, shared, count))  # integers by its annotation
    kv_growth = np.bincount(on, shared * together, count) * 0.5
    kv = np.bincount(on, shared * sequences.context, count) + kv_growth
    step_share = 1.0 / view.tokens_per_step
    decode = (view.stretch * step_share) * (
        later * view.c0
        + view.c_batch * (steps + own * later)
        + view.c_kv * (kv + own * later * (each + later / 2))
    )
    slower = step_share * (view.c_batch * steps + view.c_kv * (each * steps + kv_growth))
    return decode, own * slower, steps


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


@dataclass(slots=True)
class AdapterTimes:
    """Times that a LoRA adapter adds, one entry of each array a candidate of a view."""

    wait: Floats  # seconds until the batch has a place for the adapter
    load: Floats  # seconds to load it
    wasted: Floats
    """Seconds that others lose: all that decode stand still while it is loaded, and what is dropped
    for it may have to be loaded again."""
    overrun: float
    """Times as long as for what came before it that a request waits: requests for the adapters in
    the batch that come after it pass."""


def add_adapter(prediction: Prediction, times: AdapterTimes) -> None:
    """Puts into a prediction what an adapter costs, with B sequences decoding::

    T_first   += (wait for a place of the adapter − admission, if more) + load
    avoidable += B·load + load again what is dropped, where that is likely
    """
    later = np.maximum(times.wait - prediction.admission, 0.0) + times.load
    prediction.adapter = later
    prediction.ttft = prediction.ttft + later
    prediction.completion = prediction.completion + later
    prediction.avoidable = prediction.avoidable + times.wasted
    prediction.first_token_share = least(prediction.ttft) / least(prediction.completion)


def add_queue_wait(
    prediction: Prediction, wait: Floats, queued: Floats | float, batch: Floats
) -> None:
    """Puts the wait at the router into a prediction: the engine admits the request after it.

    Avoidable prefill counts once for each of the B sequences decoding and once for the cache
    (:func:`predict`); it delays each of the requests ``queued`` for the replica, too.
    """
    later = np.maximum(wait - prediction.admission, 0.0)
    prediction.avoidable = prediction.avoidable * (1.0 + queued / (batch + 1.0))
    prediction.queue = wait
    prediction.ttft = prediction.ttft + later
    prediction.completion = prediction.completion + later


FULL = 0.94  # KV pressure from which on a replica can carry no other request: sequences grow


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
