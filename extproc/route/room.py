"""Seconds until each candidate can carry a request to its end beside what is there.

An engine that admits more than its KV cache can carry preempts sequences and computes them again,
and everyone waits. A request that waits at the router instead can still go to any replica.
"""

from math import log

import numpy as np
from numpy.typing import NDArray

from extproc.predict.completion import FULL, Prediction, admission, backlog_s
from extproc.predict.inputs import FleetView, Floats, Sequences, most
from extproc.request.profile import RequestProfile

_AMONG_OTHERS = 0.02  # KV pressure kept free where other routers send, too
_LOOKED_AT = 0.3, 0.6, 0.95  # shares of the request's tokens at which pressure is computed
_LEAST_SPREAD = 1.1  # p90 ÷ mean of lengths that are all about the same
_RESERVE = 0.035  # KV pressure that requests of a higher priority may add to FULL
_PREFILLS_S = 0.2
"""Seconds of prompts that an engine is given ahead: it never runs dry, and what is behind can still
go elsewhere. With 1 s simulated code completion (azure-2023-code ×0.9) takes a tenth longer, with
0.1 s an overload of conversations does."""
SOONEST_S = 0.02  # seconds: the shortest wait for a replica that is full


def room_wait_s(
    profile: RequestProfile,
    prediction: Prediction,
    p90_output_tokens: float,
    view: FleetView,
    sequences: Sequences,
    among_others: bool,
) -> Floats | None:
    """Seconds until each candidate has room for the request; None where all have room now.

    A replica has no room where its KV cache would overflow, where a request waits for a place in
    the batch, or where the prompts ahead take more than 0.2 s: some might go elsewhere sooner. The
    one that waits takes the next place at once, and shows if the batch has more places than was
    learned. A replica has room where nothing is in flight that could end, and where it can never
    hold the whole request.
    """
    full = full_at(profile.objective.priority, among_others)
    pressure = prediction.kv_pressure + prediction.growth / view.kv_capacity
    # The prompts ahead take no longer than they and this one.
    soon = most(prediction.admission) <= 0.0 and most(prediction.prefill) <= _PREFILLS_S
    if soon and most(pressure) < full:
        return None
    queue_s, others = backlog_s(view), max(profile.sequences, 1) - 1
    behind_one = admission(view, sequences, others, profile.prompt_tokens - prediction.cached)
    waits = (behind_one > 0.0) | (queue_s > _PREFILLS_S)
    tight = waits | (pressure >= full)
    if not tight.any():
        return None
    peak = _peak_pressure(profile, prediction, p90_output_tokens, view, sequences)
    tight &= waits | (np.maximum(peak, prediction.kv_pressure) >= full)
    tight &= (view.requests > 0.0) & ~_is_too_large(profile, view)
    if not tight.any():
        return None
    missing = (peak - full) * view.kv_capacity
    needed = missing + (view.kv_capacity - view.taken)
    wait = admission(view, sequences, others, needed)
    for least in (behind_one, queue_s - _PREFILLS_S, SOONEST_S):
        wait = np.maximum(wait, least)
    return np.where(tight, wait, 0.0)


def full_at(priority: int, among_others: bool) -> float:
    """KV pressure from which on a replica can carry no other request of that priority.

    ``among_others``: other routers send there, too.
    """
    return FULL - _AMONG_OTHERS * among_others + _RESERVE * (priority > 0)


def _peak_pressure(
    profile: RequestProfile,
    prediction: Prediction,
    p90_output_tokens: float,
    view: FleetView,
    sequences: Sequences,
) -> Floats:
    """The KV pressure on each candidate when it is highest, should the request be there.

    A sequence with k KV tokens, which is to generate r more, is still there after t more with
    probability e^-(t/r)^κ (Weibull), and then has k + t. Where answers are of all lengths κ is 1:
    how long one has been there tells nothing of when it ends. Where nine of ten are hardly longer
    than their mean κ is large, so that what came together grows together until it ends. So short
    prompts with long answers, and many that come at once, need room that is free as yet.
    """
    mean, count = prediction.output_tokens, len(view)
    own = profile.prompt_tokens - prediction.cached + max(profile.sequences, 1) * mean
    taken = view.taken
    if prediction.yielded is not None:
        taken = np.maximum(taken + view.behind - prediction.yielded, 0.0)
    now = (taken + own) / view.kv_capacity
    if not mean:
        return now
    spread = max(p90_output_tokens / mean, _LEAST_SPREAD)
    shape = max(log(log(10.0)) / log(spread), 1.0)
    more = np.zeros(count)
    yields = sequences.priority < profile.priority
    yields &= view.by_priority[sequences.replica] > 0.0
    weight = np.where(yields, 0.0, sequences.weight)
    for share in _LOOKED_AT:
        t = share * mean
        there = np.exp(-((t / np.maximum(sequences.remaining, 1.0)) ** shape))
        change = weight * ((sequences.context + t) * there - sequences.context)
        np.maximum(more, np.bincount(sequences.replica, change, count), out=more)
    return now + more / view.kv_capacity


def _is_too_large(profile: RequestProfile, view: FleetView) -> NDArray[np.bool_]:
    """A prompt that is too long is refused there at once; of a request with many parts the engine
    begins some."""
    too_large = profile.longest_prompt > view.longest_prompt
    if profile.parts > 1:
        too_large |= profile.parts > view.max_num_seqs
        too_large |= profile.prompt_tokens > view.kv_capacity
    return too_large
