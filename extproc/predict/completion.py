"""Completion time: predicts a request on all candidates at once, in one expression."""

from functools import cached_property
from math import inf
from typing import cast

import numpy as np
from msgspec import Struct

from extproc.predict.inputs import FleetView, Floats, Indices, Sequences, least, most
from extproc.request.profile import RequestProfile

_FIRST_TOKEN = 2.0
"""Largest weight of the time to first token of a stream, against the completion, which contains
that time already. In simulation first tokens come sooner, and completions no later
(docs/tried.md)."""


class AdapterTimes(Struct, eq=False):
    """Times that a LoRA adapter adds, in seconds, for each candidate of a view."""

    wait: Floats  # until the batch has a slot for the adapter
    load: Floats  # to load the adapter
    wasted: Floats  # delay of other requests: decoding stops, and evicted adapters load again


class Prediction(Struct, eq=False, dict=True):  # `cached_property` needs the dictionary
    """Predicted times in seconds; arrays have an entry for each candidate of the view."""

    output_tokens: float  # expected length of each sequence of the request
    admission: Floats  # wait until enough KV space and a place in the batch are free
    prefill: Floats  # steps that prefill the prompts ahead and this prompt, plus ``outside_steps``
    outside_steps: Floats  # delay of the first token that the engine's steps do not explain
    decode: Floats  # from the first token to the last
    ttft: Floats  # time to first token: admission, prefill, adapter, and the wait at the router
    completion: Floats  # time to the last token
    cost_to_others: Floats  # delay of the requests in flight, summed over them
    kv_pressure: Floats  # fraction of the KV cache in use, with the request and its output, 0…1
    growth: Floats  # tokens that other sequences, if not preempted, generate until the request ends
    cached: Floats  # prompt tokens in the replica's prefix cache
    avoidable: Floats
    """Time to prefill tokens that another candidate has cached. It counts once for each request
    that the prefill delays, and once for the cache space that the tokens take. The delay that
    loading a LoRA adapter causes to other requests is added."""

    first_token_matters: bool  # the answer is streamed or has a target for its first token
    first_token_share: float  # lowest time to first token ÷ lowest completion, 0…1
    adapter: Floats  # wait for the LoRA adapter's slot after admission, and time to load it
    queue: Floats  # expected wait at the router; 0: the replica can start the request now
    taken: Floats  # KV tokens in use or for the backlog, without those that vLLM would preempt
    preemptible: Floats | None
    """KV tokens of sequences that vLLM would preempt rather than this request; None: no candidate
    schedules by priority."""

    later: Floats  # part of ``ttft`` and ``completion`` due to ``queue``

    def start_now(self, at: int) -> None:
        """Takes the wait at the router out of the prediction for the candidate ``at``."""
        for times in (self.ttft, self.completion):
            times[at] -= self.later[at]
        self.queue[at] = self.later[at] = 0.0

    @cached_property
    def first_token_weight(self) -> float:
        """Weight of the time to first token (:func:`~extproc.route.policies.completion`).

        0 if the response is not streamed and has no target for its first token, because nobody
        sees when that token comes. Otherwise ``2·(1 − f)·(1 − kv²)`` with
        f = ``first_token_share`` and kv the KV pressure of the candidate that ends the request
        first: where replicas fill, a longer completion makes queued requests wait. 0, too, if the
        request would wait at the router for that candidate. The weight with which the policy scored
        stays if :meth:`start_now` changes the wait afterwards.
        """
        if not self.first_token_matters:
            return 0.0
        soonest = self.completion.argmin()
        if self.queue.item(soonest) > 0.0:
            return 0.0
        pressure = self.kv_pressure.item(soonest)
        return _FIRST_TOKEN * (1.0 - self.first_token_share) * (1.0 - pressure**2)

    @property
    def cost_weight(self) -> Floats:
        """Weight of the cost to others, 0…1 (:func:`~extproc.route.policies.completion`).

        1 if the response is not streamed and has no target for its first token. Otherwise
        ``max(kv_pressure², min(f / (1 − f), 1))`` with f = ``first_token_share``.
        """
        if not self.first_token_matters:
            return np.ones(len(self.kv_pressure))
        share = self.first_token_share
        return np.maximum(self.kv_pressure**2, share / (1.0 - share) if share < 0.5 else 1.0)

    @property
    def lost_by_others(self) -> Floats:
        """Seconds that other requests lose, as the policy ``completion`` counts them."""
        return self.cost_weight * self.cost_to_others + self.avoidable


def predict(
    profile: RequestProfile,
    output_tokens: float,
    view: FleetView,
    sequences: Sequences,
    held: Floats,
    adapter: AdapterTimes | None = None,
) -> Prediction:
    """Predicts a request on every candidate.

    The request has p prompt tokens, of which h are cached and u = p − h are to be prefilled. Each
    of its sequences is expected to generate o tokens: the prefill gives the first, and n = o − 1
    decode steps follow. The replica has a backlog of W prompt tokens, and B decoding sequences with
    K KV tokens. Sequence i in flight has k_i KV tokens, is to generate r_i more, and shares
    m_i = min(r_i, n) steps::

        T_first   = admission + (W + u)·c_prefill + ceil((W + u)/budget)·step + x·step + y + z·p
        T_decode  = s/d·(n·c0 + c_batch·(n + Σ m_i) + c_kv·(Σ m_i·(k_i + m_i/2) + n·p + n²/2))
        cost      = B·u·c_prefill + Σ m_i·(c_batch + c_kv·(p + m_i/2))/d
        avoidable = (u − least u of all candidates)·c_prefill·(B + 1)

    ``step`` is the time of a decode step with B and K, s the ratio of actual to predicted decode
    time (:class:`~extproc.predict.correction.Corrections`), and d the tokens that a sequence gets
    from a step; x, y and z are the delays outside the steps
    (:class:`~extproc.predict.correction.FirstTokens`).

    On a replica that schedules by priority, W and the queue for admission leave out requests of a
    lower priority. The KV pressure leaves out sequences of a lower priority, because vLLM preempts
    them first. Admission counts these sequences: vLLM preempts none to admit a request. Admission
    is infinite for candidates that cannot hold the prompt, if another candidate can.

    A LoRA adapter adds max(wait for a slot − admission, 0) + load to T_first, and to ``avoidable``
    B·load, and another load if the evicted adapter is likely to be needed again.

    A sequence that is about to end hardly delays the request and is hardly delayed by it; a long
    sequence counts for the whole decode time.

    ``held``: prompt tokens that each candidate should have in its prefix cache; h is at most p − 1,
    because vLLM always computes the last token. An empty prompt counts as one token, because it
    takes a step as well.
    """
    own, context = max(profile.sequences, 1), most(view.longest_prompt)
    prompt = max(profile.computed_prompt(context), 1.0)
    out = float(output_tokens)
    uncached: Floats | float = prompt
    cached = avoidable = held
    if most(held) > 0.0:
        cached = np.minimum(held, prompt - 1.0)
        uncached = prompt - cached
        avoidable = (uncached - least(uncached)) * (view.c_prefill * (view.batch + 1.0))
    wait = admission(view, sequences, own, uncached)
    if least(view.longest_prompt) < profile.longest_prompt <= context:
        wait[view.longest_prompt < profile.longest_prompt] = np.inf  # too small for the prompt
    each_step, request, token = view.outside_steps
    outside_steps = each_step * view.decode_step + (request + token * prompt)
    prefill = _prefill_s(view, view.backlog + uncached) + outside_steps
    decode, slower, growth = _decode(view, sequences, own, prompt, out)
    ttft = wait + prefill
    completion = ttft + decode
    none = adapter_s = np.zeros(len(view))
    if adapter is not None:
        adapter_s = np.maximum(adapter.wait - wait, 0.0) + adapter.load
        ttft, completion = ttft + adapter_s, completion + adapter_s
        avoidable = avoidable + adapter.wasted
    taken, preemptible = view.taken, None
    if view.overtaken is not None:
        preemptible, preempted_growth = _preemptible(profile.priority, view, sequences, out)
        taken = np.maximum(taken + view.overtaken - preemptible, 0.0)
        growth = growth - preempted_growth
    kv_pressure = np.minimum((taken + (uncached + own * out)) / view.kv_capacity, 1.0)
    return Prediction(
        out,
        wait,
        prefill,
        outside_steps,
        decode,
        ttft,
        completion,
        view.c_prefill * uncached * view.batch + slower,
        kv_pressure,
        growth,
        cached,
        avoidable,
        profile.stream or profile.objective.ttft_s < inf,
        least(ttft) / least(completion),
        adapter_s,
        none,
        taken,
        preemptible,
        none,
    )


def backlog_s(view: FleetView) -> Floats:
    """Seconds until the backlog of each candidate is prefilled."""
    return _prefill_s(view, view.backlog)


def _prefill_s(view: FleetView, tokens: Floats) -> Floats:
    steps = np.ceil(tokens / view.token_budget)
    return tokens * view.c_prefill + steps * view.decode_step


def _preemptible(
    priority: int, view: FleetView, sequences: Sequences, out: float
) -> tuple[Floats, Floats]:
    """KV tokens of the sequences that vLLM would preempt rather than the request, and the tokens
    that these sequences generate until the request ends."""
    on, count = sequences.replica, len(view)
    lower = ((sequences.priority < priority) & (view.by_priority[on] > 0.0)).nonzero()[0]
    on, weight = on[lower], sequences.weight[lower]
    together = np.minimum(sequences.remaining[lower], max(out - 1.0, 0.0))
    held = cast(Floats, np.bincount(on, weight * sequences.context[lower], count))
    return held, cast(Floats, np.bincount(on, weight * together, count))


def _decode(
    view: FleetView, sequences: Sequences, own: int, prompt: float, out: float
) -> tuple[Floats, Floats, Floats]:
    """Decode time of the request, delay that it causes to the sequences in flight, and tokens that
    these sequences generate meanwhile."""
    count = len(view)
    # The prefill gives the first token; `later` decode steps follow.
    later, each = max(out - 1.0, 0.0), prompt / own
    on, together = sequences.replica, np.minimum(sequences.remaining, later)
    shared = together * sequences.weight
    steps = cast(Floats, np.bincount(on, shared, count))  # numpy's annotation says integers
    kv_growth = np.bincount(on, shared * together, count) * 0.5
    kv = np.bincount(on, shared * sequences.context, count) + kv_growth
    decode = (view.stretch / view.tokens_per_step) * (
        later * view.c0
        + view.c_batch * (steps + own * later)
        + view.c_kv * (kv + own * later * (each + later / 2))
    )
    slower = view.c_batch * steps + view.c_kv * (each * steps + kv_growth)
    return decode, (own / view.tokens_per_step) * slower, steps


def admission(view: FleetView, sequences: Sequences, own: int, needed: Floats | float) -> Floats:
    """Seconds until enough sequences in flight have ended to free the KV tokens and the places in
    the batch that the request needs.

    vLLM admits a prompt once all of its tokens fit, after the prompts queued before it.

    ``own``: places in the batch that the request needs. ``needed``: KV tokens, for each candidate.
    """
    wait = np.zeros(len(view))
    missing = needed - (view.kv_capacity - view.taken)
    places = view.max_num_seqs - view.batch - view.waiting
    if most(missing) <= 0.0 and least(places) >= own:
        return wait
    on_full = ((missing > 0.0) | (places < own))[sequences.replica].nonzero()[0]
    if not len(on_full):
        return wait
    # Sequences on full replicas, sorted by replica and then by the time at which they end.
    on_full = on_full[np.lexsort((sequences.remaining[on_full], sequences.replica[on_full]))]
    weight, remaining = sequences.weight[on_full], sequences.remaining[on_full]
    on = sequences.replica[on_full]
    borders = (on[1:] != on[:-1]).nonzero()[0] + 1
    first, end = np.concatenate([[0], borders]), np.concatenate([borders, [len(on)]])
    full = on[first]
    freed = weight * (sequences.context[on_full] + remaining)
    last = np.maximum(
        _reaching(freed, first, missing[full]), _reaching(weight, first, own - places[full])
    )
    token = view.decode_step[full] / view.tokens_per_step[full]
    wait[full] = remaining[np.minimum(last, end - 1)] * token
    return wait


def _reaching(amounts: Floats, first: Indices, wanted: Floats) -> Indices:
    """Returns for each group the first index at which the running sum of the group's ``amounts``
    reaches ``wanted``. ``first``: index of each group's first amount."""
    sums = amounts.cumsum()
    before = sums[first] - amounts[first]
    return np.maximum(sums.searchsorted(before + wanted), first)


def add_queue_wait(
    prediction: Prediction, view: FleetView, wait: Floats, queued: Floats | float
) -> None:
    """Adds the wait at the router to a prediction. The wait for admission by the engine and the
    prefill of the prompts ahead pass at the same time, so the longer of the two times counts.

    :func:`predict` counts avoidable prefill once for each of the B decoding sequences and once for
    the cache. Here it counts once more for each of the requests ``queued`` for the replica.
    """
    later = np.maximum(wait - prediction.admission - backlog_s(view), 0.0)
    prediction.avoidable = prediction.avoidable * (1.0 + queued / (view.batch + 1.0))
    prediction.queue, prediction.later = wait, later
    prediction.ttft = prediction.ttft + later
    prediction.completion = prediction.completion + later


FULL = 0.94  # KV pressure at which a replica has no room: the rest is for sequences that grow


def work(profile: RequestProfile, prediction: Prediction, view: FleetView, at: int) -> float:
    """Seconds of engine time that the request uses up on the candidate ``at``.

    With u prompt tokens to prefill, o output tokens, d tokens per step, and on average K KV tokens
    in use, of which m are not shared through the prefix cache::

        work  = u·c_prefill + o/d·(share·c0 + c_batch + c_kv·K)
        share = max(m / (0.94·KV capacity), 1 / places in the batch)

    The share is the request's part of each step's c0. The shares of a full batch add up to 1, so a
    replica is just at capacity if the requests that arrive in a second bring 1 s of work. In a
    batch that is not full, a request takes a larger share: work is a lower bound. The stretch of
    decode times is left out, because most of it is prefill of other requests, which is their work.
    If the time per token or the completion has a target, steps must be fast enough to meet it: the
    batch must be smaller, and the share is larger.
    """
    own, out = max(profile.sequences, 1), prediction.output_tokens
    prompt = profile.computed_prompt(view.longest_prompt.item(at))
    later = max(out - 1.0, 0.0)
    uncached = max(prompt - prediction.cached.item(at), 0.0)
    prefill = uncached * view.c_prefill.item(at)
    step = view.c0.item(at)
    if not later:
        return prefill + step * uncached / view.token_budget.item(at)
    decoded = own * later / 2
    places, memory = view.max_num_seqs.item(at), FULL * view.kv_capacity.item(at)
    share = max((uncached + decoded) / memory, own / places)
    steps = later / view.tokens_per_step.item(at)
    rows = own * view.c_batch.item(at) + view.c_kv.item(at) * (prompt + decoded)
    objective = profile.objective
    longest = min(prefill + objective.tpot_s * later, objective.completion_s)
    if longest < inf:
        spare = longest - steps * step
        share = max(share, (steps * rows + prefill) / spare) if spare > 0.0 else 1.0
    return prefill + steps * (min(share, 1.0) * step + rows)
