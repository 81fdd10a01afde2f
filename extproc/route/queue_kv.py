"""``queue_kv``: queue and KV cache at the last poll, and what is cached of the prompt, weighed."""

import random

import numpy as np

from extproc.route.policy import Choice, Situation, lowest

_QUEUE_WEIGHT = 2.0
_KV_WEIGHT = 2.0
_PREFIX_WEIGHT = 3.0
"""The weights llm-d's endpoint picker gives its queue, KV and prefix scorers by default."""


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
        spread = float(np.ptp(waiting))
        queue = (waiting.max() - waiting) / spread if spread else np.ones(len(view))
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
