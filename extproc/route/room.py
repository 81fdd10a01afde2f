"""Room: seconds until each candidate can carry a request to its end beside its other requests.

An engine that admits more requests than its KV cache can carry preempts sequences and computes them
again, as far as its prefix cache no longer has them. That delays all its requests: without a prefix
cache, a simulated overload of conversations takes 27% longer if no limit on the KV cache holds
requests back. A request that waits at the router instead can still go to any replica.
"""

from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from extproc.predict.completion import FULL, admission, backlog_s
from extproc.predict.inputs import FleetView, Floats, most
from extproc.request.profile import RequestProfile
from extproc.route.decision import Situation

_AMONG_OTHERS = 0.02  # KV pressure kept free for requests that other routers send
_SAMPLED_AT = 0.3, 0.6, 0.95  # fractions of the expected answer at which pressure is computed
_LEAST_SPREAD = 1.1  # lower bound of p90 ÷ mean of output lengths
_RESERVE = 0.035  # KV pressure beyond FULL that requests of a priority above 0 may use
_PREFILLS_S = 0.2
"""Seconds of prefill that a replica may have queued: enough that the engine never runs dry, while
further requests can still go elsewhere. With 1 s, simulated code completion (azure-2023-code ×0.9)
takes a tenth longer; with 0.1 s, an overload of conversations takes a tenth longer."""
SOONEST_S = 0.02  # seconds: the shortest wait for a replica that is full


class RoomWait(NamedTuple):
    """Wait until each candidate has room for a request."""

    seconds: Floats
    optional: NDArray[np.bool_]
    """True: only the prompts ahead keep the request waiting. The engine can take the request now;
    it ends there at the same time whether it waits at the router or in the engine."""


def room_wait(situation: Situation) -> RoomWait | None:
    """Return the wait until each candidate has room for the request; None if all have room.

    A replica has no room if its KV cache would overflow, if another request already waits there for
    a place in the batch, or if the prompts ahead take more than 0.2 s. The first request that would
    wait for a place is sent all the same: it takes the next free place at once, and shows if the
    batch has more places than the router has learned. A replica always has room if no request is in
    flight there, because none could end, or if it can never hold the whole request.
    """
    profile, view, prediction = situation.profile, situation.view, situation.prediction
    full = full_at(profile.objective.priority, situation.among_others)
    pressure = prediction.kv_pressure + prediction.growth / view.kv_capacity
    # Prefill includes the prompts ahead of the request, so they take at most as long.
    soon = most(prediction.admission) <= 0.0 and most(prediction.prefill) <= _PREFILLS_S
    if soon and most(pressure) < full:
        return None
    queue_s, others = backlog_s(view), max(profile.sequences, 1) - 1
    behind_first = admission(
        view, situation.sequences, others, profile.prompt_tokens - prediction.cached
    )
    behind, prompts_ahead, tight = behind_first > 0.0, queue_s > _PREFILLS_S, pressure >= full
    if not (behind | prompts_ahead | tight).any():
        return None
    peak = _peak_pressure(situation)
    tight &= np.maximum(peak, prediction.kv_pressure) >= full
    tight |= behind
    waits = (tight | prompts_ahead) & (view.requests > 0.0) & ~_is_too_large(profile, view)
    if not waits.any():
        return None
    needed = (peak - full + 1.0) * view.kv_capacity - view.taken
    wait = admission(view, situation.sequences, others, needed)
    for least in (behind_first, queue_s - _PREFILLS_S, SOONEST_S):
        wait = np.maximum(wait, least)
    return RoomWait(np.where(waits, wait, 0.0), waits & ~tight)


def full_at(priority: int, among_others: bool) -> float:
    """Return the KV pressure at which a replica is full for requests of a priority.

    ``among_others``: other routers also send requests to the replica.
    """
    return FULL - _AMONG_OTHERS * among_others + _RESERVE * (priority > 0)


def _peak_pressure(situation: Situation) -> Floats:
    """Return the highest KV pressure that each candidate would reach with the request.

    A sequence with k KV tokens and an expected r tokens to go still runs t tokens later with
    probability e^-(t/r)^κ (Weibull), and then has k + t KV tokens. κ is 1 if output lengths vary
    widely: the age of a sequence then says nothing about its end. κ is large if the p90 of the
    output length hardly exceeds the mean: sequences that begin together grow together until they
    end. So a replica whose requests have short prompts and long answers, or arrived together, needs
    more space later than it uses now.
    """
    profile, view, prediction = situation.profile, situation.view, situation.prediction
    sequences, mean = situation.sequences, prediction.output_tokens
    own = profile.prompt_tokens - prediction.cached + max(profile.sequences, 1) * mean
    now = (prediction.taken + own) / view.kv_capacity
    if not mean:
        return now
    spread = max(situation.p90_output_tokens / mean, _LEAST_SPREAD)
    shape = max(log(log(10.0)) / log(spread), 1.0)
    yields = (sequences.priority < profile.priority) & (view.by_priority[sequences.replica] > 0.0)
    weight = np.where(yields, 0.0, sequences.weight)
    more = np.zeros(len(view))
    for share in _SAMPLED_AT:
        t = share * mean
        running = np.exp(-((t / np.maximum(sequences.remaining, 1.0)) ** shape))
        change = weight * ((sequences.context + t) * running - sequences.context)
        np.maximum(more, np.bincount(sequences.replica, change, len(view)), out=more)
    return now + more / view.kv_capacity


def _is_too_large(profile: RequestProfile, view: FleetView) -> NDArray[np.bool_]:
    """Return True for replicas that can never hold the request. Waiting for room would not help:
    the engine at once refuses a prompt that is too long, and starts only some sequences of a
    request that has too many."""
    too_large = profile.longest_prompt > view.longest_prompt
    if profile.parts > 1:
        too_large |= profile.parts > view.max_num_seqs
        too_large |= profile.prompt_tokens > view.kv_capacity
    return too_large
