"""``lmetric``: prefill work times batch size."""

import random

import numpy as np

from extproc.predict.inputs import Floats
from extproc.route.policy import Choice, Situation, lowest


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
