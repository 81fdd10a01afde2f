"""``queue_kv``: a short queue and a free KV cache at the last poll, weighed."""

import random

import numpy as np

from extproc.route.policy import Choice, Situation, lowest

_QUEUE_WEIGHT = 2.0
_KV_WEIGHT = 2.0
"""The weights llm-d's endpoint picker gives its queue and KV scorers."""


class QueueKv:
    """Scorers of the Gateway API Inference Extension's endpoint picker.

    Highest ``2·(max − x)/(max − min) + 2·(1 − kv)`` with x the requests in the replica's queue and
    kv the fraction of its KV cache in use. As there, both are the last poll's: what was sent since
    then does not count.
    """

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica with the highest weighted sum, at random among equals."""
        view = situation.view
        waiting = view.polled_waiting
        spread = float(np.ptp(waiting))
        queue = (waiting.max() - waiting) / spread if spread else np.ones(len(view))
        scores = -(_QUEUE_WEIGHT * queue + _KV_WEIGHT * (1.0 - view.polled_kv_usage))
        return Choice(lowest(scores, random), scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """Its queue and its KV cache."""
        waiting = situation.view.polled_waiting[choice.first]
        usage = situation.view.polled_kv_usage[choice.first]
        return f"{waiting:.0f} waiting, {usage:.0%} of its KV cache in use"
