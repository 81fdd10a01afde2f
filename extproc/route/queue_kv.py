"""``queue_kv``: a short queue and a free KV cache, weighed."""

import random

import numpy as np

from extproc.route.policy import Choice, Situation, lowest

_QUEUE_WEIGHT = 2.0
_KV_WEIGHT = 2.0
"""The weights llm-d's endpoint picker gives its queue and KV scorers."""


class QueueKv:
    """Scorers of the Gateway API Inference Extension's endpoint picker.

    Highest ``2·(max − x)/(max − min) + 2·(1 − kv)`` with x the requests waiting in the queue.
    """

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica with the highest weighted sum, at random among equals."""
        view = situation.view
        spread = float(np.ptp(view.waiting))
        queue = (view.waiting.max() - view.waiting) / spread if spread else np.ones(len(view))
        scores = -(_QUEUE_WEIGHT * queue + _KV_WEIGHT * (1.0 - view.kv_usage))
        return Choice(lowest(scores, random), scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """Its queue and its KV cache."""
        waiting = situation.view.waiting[choice.first]
        usage = situation.view.kv_usage[choice.first]
        return f"{waiting:.0f} waiting, {usage:.0%} of its KV cache in use"
