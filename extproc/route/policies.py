"""The policies there are, by the name configuration and requests use: ``completion``, and baselines
that do without a prediction, as other routers have them."""

import random
from collections.abc import Callable

import numpy as np

from extproc.predict.inputs import Floats, least, most
from extproc.route.completion import Completion
from extproc.route.policy import Choice, Policy, Situation, lowest

_QUEUE_WEIGHT = 2.0
_KV_WEIGHT = 2.0
_PREFIX_WEIGHT = 3.0
"""The weights llm-d's endpoint picker gives its queue, KV and prefix scorers by default."""

_ENOUGH = 0.3
"""Share of the prompt in a prefix cache: where no replica has more, the load decides."""
_UNEVEN_REQUESTS, _UNEVEN_RATIO = 64, 1.5
"""It does, too, where the most and the least loaded differ by more than both: requests, times."""


class LeastRequest:
    """Lowest number of requests in flight, live: the router's own and those the poll saw."""

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica with the fewest requests, at random among equals."""
        requests = situation.view.requests
        return Choice(lowest(requests, random), requests)

    def why(self, situation: Situation, choice: Choice) -> str:
        """How many it has."""
        return f"{situation.view.requests[choice.first]:.0f} requests in flight"


class RoundRobin:
    """The one whose last turn is longest ago, whatever it is doing.

    That is one after another, also where requests for several models take turns on overlapping
    sets of replicas.
    """

    def __init__(self) -> None:
        self._turns = np.zeros(0)
        """The last of each row of the fleet's table, which another replica may have got since."""
        self._count = 0

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The next in turn."""
        rows = situation.view.rows
        if (size := rows.item(rows.argmax()) + 1) > len(self._turns):
            self._turns = np.append(self._turns, np.zeros(size))
        last_turns = self._turns[rows]
        first = int(last_turns.argmin())
        self._count += 1
        self._turns[rows[first]] = self._count
        return Choice(first, last_turns)

    def why(self, situation: Situation, choice: Choice) -> str:
        """That its last turn is the longest ago."""
        return "its turn"


class RandomChoice:
    """Any replica, each as likely."""

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """One at random, and another for a retry."""
        drawn = random.randbytes(4 * len(situation.view))
        scores = np.frombuffer(drawn, np.uint32).astype(np.float64)
        return Choice(int(scores.argmin()), scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """No reason."""
        return "at random"


class PowerOfTwo:
    """Fewer requests in flight of two replicas drawn at random (Mitzenmacher, 2001).

    Robust to figures that are out of date: requests do not herd onto one replica.
    """

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The less loaded of the two drawn; the other is for a retry."""
        view = situation.view
        drawn = random.sample(range(len(view)), min(2, len(view)))
        scores = np.full(len(view), np.inf)
        for index in drawn:
            scores[index] = view.requests[index]
        return Choice(min(drawn, key=scores.item), scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """The two drawn, the better one first."""
        view = situation.view
        drawn = [index for index in (choice.first, choice.second) if index is not None]
        compared = " and ".join(f"{view.names[i]} with {view.requests[i]:.0f}" for i in drawn)
        return f"fewest requests in flight of those drawn: {compared}"


class LeastKv:
    """Lowest fraction of the KV cache in use, as AIBrix's ``least-kv-cache``: at the last poll."""

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica with the most KV space, at random among equals."""
        usage = situation.view.polled_kv_usage
        return Choice(lowest(usage, random), usage)

    def why(self, situation: Situation, choice: Choice) -> str:
        """How full its KV cache is."""
        return f"{situation.view.polled_kv_usage[choice.first]:.0%} of its KV cache in use"


class QueueKv:
    """The default scorers of llm-d's endpoint picker.

    Highest ``2·(max − x)/(max − min) + 2·(1 − kv) + 3·h/p`` with x the requests in the replica's
    queue, kv the fraction of its KV cache in use and h the tokens of the prompt's p that it has in
    its prefix cache. As there, x and kv are the last poll's: what was sent since then does not
    count, but for the prompts that are cached by it.
    """

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica with the highest weighted sum, at random among equals."""
        view = situation.view
        waiting = view.polled_waiting
        fullest = most(waiting)
        spread = fullest - least(waiting)
        queue = (fullest - waiting) / spread if spread else 1.0
        scores = -(
            _QUEUE_WEIGHT * queue
            + _KV_WEIGHT * (1.0 - view.polled_kv_usage)
            + _PREFIX_WEIGHT * situation.cached_share
        )
        return Choice(lowest(scores, random), scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """Its queue, its KV cache, and what it has of the prompt where that is something."""
        waiting = situation.view.polled_waiting[choice.first]
        usage = situation.view.polled_kv_usage[choice.first]
        load = f"{waiting:.0f} waiting, {usage:.0%} of its KV cache in use"
        cached = situation.cached_share[choice.first]
        return f"{load}, {cached:.0%} of the prompt cached" if cached else load


class LMetric:
    """Lowest ``(queued + own uncached prompt tokens) · (batch size + 1)`` (LMetric, OSDI 2026).

    No hardware profile and no output length, and still the strongest simple rule where replicas
    are of equal speed and the counts are live.
    """

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica with the lowest product, at random among equals."""
        scores = _to_prefill(situation) * (situation.view.requests + 1.0)
        return Choice(lowest(scores, random), scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """The two factors."""
        tokens = _to_prefill(situation)[choice.first]
        requests = situation.view.requests[choice.first] + 1.0
        return f"{tokens:,.0f} tokens to prefill × {requests:.0f} requests"


def _to_prefill(situation: Situation) -> Floats:
    new = situation.profile.prompt_tokens - situation.prediction.cached
    return situation.view.backlog + np.maximum(new, 1.0)


class CacheAware:
    """The policy of sglang-router, vllm-router and smg, with their defaults.

    The replica with the most of the prompt in its prefix cache if that is more than 0.3 of it; the
    one with the fewest requests in flight if none has as much, or if the most loaded replica has
    more than 64 requests more than the least loaded one, and more than 1.5 times as many.
    """

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """That replica, at random among equals."""
        cached = situation.cached_share
        scores = situation.view.requests if self._by_load(situation) else -cached
        return Choice(lowest(scores, random), scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """What it has of the prompt, or its load."""
        if self._by_load(situation):
            return f"{situation.view.requests[choice.first]:.0f} requests in flight"
        return f"{situation.cached_share[choice.first]:.0%} of the prompt cached"

    def _by_load(self, situation: Situation) -> bool:
        requests = situation.view.requests
        high, low = most(requests), least(requests)
        uneven = high - low > _UNEVEN_REQUESTS and high > _UNEVEN_RATIO * low
        return uneven or most(situation.cached_share) <= _ENOUGH


POLICIES: dict[str, Callable[[], Policy]] = {
    "completion": Completion,
    "least_request": LeastRequest,
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "power_of_two": PowerOfTwo,
    "least_kv": LeastKv,
    "queue_kv": QueueKv,
    "lmetric": LMetric,
    "cache_aware": CacheAware,
}
