"""``cache_aware``: where most of the prompt is cached, unless the load is far from even."""

import random

from extproc.route.policy import Choice, Situation, lowest

_ENOUGH = 0.3
"""Share of the prompt: where no replica has more of it, the load decides."""
_UNEVEN_REQUESTS, _UNEVEN_RATIO = 64, 1.5
"""It is where the most and the least loaded replica differ by more than both: requests, times."""


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
        most, least = float(requests.max()), float(requests.min())
        uneven = most - least > _UNEVEN_REQUESTS and most > _UNEVEN_RATIO * least
        return uneven or float(situation.cached_share.max()) <= _ENOUGH
