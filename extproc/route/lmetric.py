"""``lmetric``: prefill work times batch size."""

import random

from extproc.route.policy import Choice, Situation, lowest


class LMetric:
    """Lowest ``(queued + own prompt tokens) · (batch size + 1)`` (LMetric, OSDI 2026).

    No hardware profile and no output length, and still the strongest simple rule where replicas
    are of equal speed and the counts are live.
    """

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica with the lowest product, at random among equals."""
        view = situation.view
        tokens = view.backlog + max(situation.profile.prompt_tokens, 1)
        scores = tokens * (view.requests + 1.0)
        first = lowest(scores, random)
        why = f"{tokens[first]:.0f} tokens to prefill × {view.requests[first] + 1:.0f} requests"
        return Choice(first, scores, why)
