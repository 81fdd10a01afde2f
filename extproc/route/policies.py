"""Policies by the names that the configuration and requests use: each scores all candidates.

``completion`` uses predictions; the other policies come from other routers.
"""

from collections.abc import Callable
from random import Random

import numpy as np

from extproc.predict.completion import Prediction
from extproc.predict.inputs import Floats, Indices, least, most
from extproc.route.decision import Situation

_NEAR_TIE = 0.1  # relative difference up to which scores are equal: about a prediction's error

_QUEUE_WEIGHT, _KV_WEIGHT, _PREFIX_WEIGHT = 2.0, 2.0, 3.0  # llm-d's defaults, for ``queue_kv``

_ENOUGH = 0.3  # ``cache_aware``: cached share of the prompt above which the cache decides
_UNEVEN_REQUESTS, _UNEVEN_RATIO = 64, 1.5  # ``cache_aware``: above both, the load decides

_TIE = 1e-6  # ``power_of_two``: added to the second score, so that the first wins ties


def as_good(prediction: Prediction, scores: Floats) -> Indices:
    """Return the candidates whose scores ``completion`` treats as equal to the lowest.

    The band of equal scores is narrower if the first token takes most of the completion, and for a
    replica whose KV cache fills, because there a longer completion makes queued requests wait.
    """
    lowest = least(scores)
    band = lowest * _NEAR_TIE * (1.0 - prediction.first_token_share)
    return (scores <= lowest + band * (1.0 - prediction.kv_pressure**2)).nonzero()[0]


def soonest(situation: Situation, equal: Indices) -> Indices:
    """Return the candidates whose first token comes soonest, among candidates with equal scores.

    Times at most a step after the soonest count as equal to it: a request arrives at a random
    moment of a step.
    """
    ttft, step = situation.prediction.ttft[equal], least(situation.view.c0[equal])
    return equal[ttft <= least(ttft) + step]


def with_few_requests(situation: Situation, equal: Indices) -> Indices:
    """Return the candidates with few requests.

    With one router, or if a candidate is idle, these are the candidates with the fewest. With
    several routers, a candidate has few requests if it has at most one more than the mean of the
    candidates. With a stricter rule, routers that have not heard of each other's last requests
    would all choose the same candidate.
    """
    requests = situation.view.requests[equal]
    few = least(requests)
    if situation.among_others and few > 0.0:
        few = requests.sum().item() / len(equal) + 1.0
    return equal[requests <= few]


def lowest(scores: Floats, random: Random) -> int:
    """Return the index of the lowest score, at random among equals.

    The first of equal replicas would otherwise receive every request until the next poll.
    """
    equal = (scores == least(scores)).nonzero()[0]
    return int(equal[0] if len(equal) == 1 else equal[random.randrange(len(equal))])


def completion(situation: Situation) -> Floats:
    """``completion + v·TTFT + w·cost to others + avoidable prefill``, in seconds.

    The weight v (:attr:`Prediction.first_token_weight`) is the same for all candidates. So a
    candidate never loses to another on which the first token and the completion come later, and
    others lose no less.

    The weight w of a streamed request (:attr:`Prediction.cost_weight`) is mostly the square of the
    KV pressure. With free KV space the request's own completion decides. On a full replica, where
    all requests wait, the time that others lose counts as well. With w = 1, long prompts of
    streamed requests would queue behind each other to spare decoding sequences.
    """
    prediction = situation.prediction
    scores = prediction.completion + prediction.lost_by_others
    if weight := prediction.first_token_weight:  # 0·∞ is no number
        scores += weight * prediction.ttft
    return scores


def round_robin(situation: Situation) -> Floats:
    """Number of each candidate's last turn; 0: no turn yet. The first of equal candidates wins.

    So replicas take turns even if several models are served by overlapping sets of replicas.
    """
    last = [situation.turns.get(row, 0) for row in situation.view.rows.tolist()]
    return np.array(last) + np.linspace(0.0, 0.5, len(last))


def uniform(situation: Situation) -> Floats:
    """Random numbers: all replicas are equally likely to be the first choice, and all others to be
    the second."""
    drawn = situation.random.randbytes(4 * len(situation.view))
    return np.frombuffer(drawn, np.uint32).astype(np.float64)


def power_of_two(situation: Situation) -> Floats:
    """Requests in flight of two replicas drawn at random (Mitzenmacher, 2001); the first wins ties.

    Stale figures do little harm: requests do not herd onto one replica.
    """
    requests = situation.view.requests
    drawn = situation.random.sample(range(len(requests)), min(2, len(requests)))
    scores = np.full(len(requests), np.inf)
    scores[drawn] = requests[drawn]
    scores[drawn[1:]] += _TIE
    return scores


def queue_kv(situation: Situation) -> Floats:
    """The default scorers of llm-d's endpoint picker, negated.

    ``2·(max − x)/(max − min) + 2·(1 − kv) + 3·h/p`` with x the requests in the replica's queue, kv
    the fraction of its KV cache in use, p the prompt tokens, and h those of them in the replica's
    prefix cache. As in the picker, x and kv come from the last poll; later requests change only h.
    """
    view = situation.view
    waiting = view.polled_waiting
    fullest = most(waiting)
    spread = fullest - least(waiting)
    queue = (fullest - waiting) / spread if spread else 1.0
    return -(
        _QUEUE_WEIGHT * queue
        + _KV_WEIGHT * (1.0 - view.polled_kv_usage)
        + _PREFIX_WEIGHT * situation.cached_share
    )


def lmetric(situation: Situation) -> Floats:
    """``(queued + own uncached prompt tokens) · (batch size + 1)`` (LMetric, OSDI 2026).

    The best of the simple rules if replicas are equally fast and the counts are current. LMetric
    needs neither a hardware profile nor output lengths.
    """
    new = np.maximum(situation.profile.prompt_tokens - situation.prediction.cached, 1.0)
    return (situation.view.backlog + new) * (situation.view.requests + 1.0)


def cache_aware(situation: Situation) -> Floats:
    """The policy of sglang-router, vllm-router and smg, with their defaults.

    The replica with the fewest requests in flight wins if load is uneven: the most loaded replica
    has over 64 requests more than the least loaded, and over 1.5 times as many. Otherwise the
    replica with the largest cached share of the prompt wins if that share exceeds 0.3, and else the
    replica with the fewest requests.
    """
    requests, cached = situation.view.requests, situation.cached_share
    high, low = most(requests), least(requests)
    uneven = high - low > _UNEVEN_REQUESTS and high > _UNEVEN_RATIO * low
    return requests if uneven or most(cached) <= _ENOUGH else -cached


POLICIES: dict[str, Callable[[Situation], Floats]] = {
    "completion": completion,
    "least_request": lambda situation: situation.view.requests,  # in flight, live
    "round_robin": round_robin,
    "random": uniform,
    "power_of_two": power_of_two,
    "least_kv": lambda situation: situation.view.polled_kv_usage,  # AIBrix's least-kv-cache
    "queue_kv": queue_kv,
    "lmetric": lmetric,
    "cache_aware": cache_aware,
}
