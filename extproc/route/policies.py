"""The policies by the names that configuration and requests use: each scores all candidates.

``completion`` goes by predictions; the others do without, as other routers have them.
"""

from collections.abc import Callable
from random import Random

import numpy as np

from extproc.predict.completion import Prediction
from extproc.predict.inputs import Floats, Indices, least, most
from extproc.route.decision import Situation

_NEAR_TIE = 0.1  # scores this close are as good as equal: about the error of a prediction
_SAME_TTFT = 0.05  # times to first token this close are

_QUEUE_WEIGHT = 2.0
_KV_WEIGHT = 2.0
_PREFIX_WEIGHT = 3.0
"""The weights llm-d's endpoint picker gives its queue, KV and prefix scorers by default."""

_ENOUGH = 0.3  # share of the prompt in a prefix cache: where no replica has more, the load decides
_UNEVEN_REQUESTS, _UNEVEN_RATIO = 64, 1.5
"""It does, too, where the most and the least loaded differ by more than both: requests, times."""

_TIE = 1e-6  # added to the score of the second of two replicas that were drawn


def choose(policy: str, situation: Situation) -> tuple[int, Floats]:
    """The candidate with the lowest score, at random among equals, and all scores.

    ``completion`` takes scores within its band for equal, of these the soonest first token, and of
    those that are as soon the replica with the fewest requests: no error of prediction decides.
    """
    scores = POLICIES[policy](situation)
    if policy != "completion":
        return lowest(scores, situation.random), scores
    equal = soonest(situation.prediction, as_good(situation.prediction, scores))
    return equal.item(lowest(situation.view.requests[equal], situation.random)), scores


def as_good(prediction: Prediction, scores: Floats) -> Indices:
    """The candidates whose scores ``completion`` takes for equal to the lowest."""
    return near_lowest(scores, _NEAR_TIE * (1.0 - prediction.first_token_share))


def soonest(prediction: Prediction, equal: Indices) -> Indices:
    """Those of equal candidates whose first token comes as soon as any."""
    return equal[near_lowest(prediction.ttft[equal], _SAME_TTFT)]


def lowest(scores: Floats, random: Random, band: float = 0.0) -> int:
    """The index of the lowest score, at random among those within a fraction ``band`` of it.

    Replicas that are as good as equal share the work: always taking the first of them would herd
    every request onto it until the next poll.
    """
    near = near_lowest(scores, band)
    return int(near[0] if len(near) == 1 else near[random.randrange(len(near))])


def near_lowest(scores: Floats, band: float = 0.0) -> Indices:
    """The indices of the scores within a fraction ``band`` of the lowest."""
    return (scores <= least(scores) * (1.0 + band)).nonzero()[0]


def completion(situation: Situation) -> Floats:
    """``completion + w·cost to others + avoidable prefill``, in seconds.

    A replica with much KV space is filled for the sake of this request alone; the fuller it gets,
    the more the time that the others lose counts, since it is then that everyone waits: w is the
    square of the KV pressure. To count less than all of that time is for the sake of the first
    token: it keeps long prompts from queueing behind each other, away from those who decode. Where
    the first token takes as long as all others, as with short answers to long prompts, the
    completion counts it already: w is at least time to first token ÷ decode time, up to 1, and a
    near tie has to be nearer.
    """
    prediction = situation.prediction
    cost_to_others = prediction.cost_weight * prediction.cost_to_others
    return prediction.completion + cost_to_others + prediction.avoidable


def round_robin(situation: Situation) -> Floats:
    """The candidate's last turn, whatever it is doing; of several that had none, the first.

    Replicas take turns one after another, also where requests for several models meet overlapping
    sets of replicas.
    """
    rows, turns = situation.view.rows.tolist(), situation.turns
    last = np.array([turns.get(row, 0) for row in rows]) + np.linspace(0.0, 0.5, len(rows))
    turns[rows[last.argmin()]] = max(turns.values(), default=0) + 1
    return last


def any_one(situation: Situation) -> Floats:
    """Random numbers: any replica, each as likely, and another for a retry."""
    drawn = situation.random.randbytes(4 * len(situation.view))
    return np.frombuffer(drawn, np.uint32).astype(np.float64)


def power_of_two(situation: Situation) -> Floats:
    """Requests in flight of two replicas drawn at random (Mitzenmacher, 2001); the first wins ties.

    Robust to figures that are out of date: requests do not herd onto one replica.
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
    the fraction of its KV cache in use and h the tokens of the prompt's p that it has in its prefix
    cache. As there, x and kv are the last poll's: what was sent since then does not count, but for
    the prompts that are cached by it.
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

    No hardware profile and no output length, and still the strongest simple rule where replicas
    are of equal speed and the counts are live.
    """
    new = np.maximum(situation.profile.prompt_tokens - situation.prediction.cached, 1.0)
    return (situation.view.backlog + new) * (situation.view.requests + 1.0)


def cache_aware(situation: Situation) -> Floats:
    """The policy of sglang-router, vllm-router and smg, with their defaults.

    The replica with the most of the prompt in its prefix cache if that is more than 0.3 of it; the
    one with the fewest requests in flight if none has as much, or if the most loaded replica has
    more than 64 requests more than the least loaded one, and more than 1.5 times as many.
    """
    requests, cached = situation.view.requests, situation.cached_share
    high, low = most(requests), least(requests)
    uneven = high - low > _UNEVEN_REQUESTS and high > _UNEVEN_RATIO * low
    return requests if uneven or most(cached) <= _ENOUGH else -cached


POLICIES: dict[str, Callable[[Situation], Floats]] = {
    "completion": completion,
    "least_request": lambda situation: situation.view.requests,  # in flight, live
    "round_robin": round_robin,
    "random": any_one,
    "power_of_two": power_of_two,
    "least_kv": lambda situation: situation.view.polled_kv_usage,  # AIBrix's least-kv-cache
    "queue_kv": queue_kv,
    "lmetric": lmetric,
    "cache_aware": cache_aware,
}
