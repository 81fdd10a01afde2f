"""``power_of_two``: the better of two at random."""

import random

import numpy as np

from extproc.route.policy import Choice, Situation


class PowerOfTwo:
    """Fewer requests in flight of two replicas drawn at random (Mitzenmacher, 2001).

    Robust to figures that are out of date: requests do not herd onto one replica.
    """

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The less loaded of the two drawn; the other is for a retry."""
        view = situation.view
        drawn = random.sample(range(len(view)), min(2, len(view)))
        first = min(drawn, key=lambda index: view.requests[index])
        scores = np.full(len(view), np.inf)
        scores[drawn] = view.requests[drawn]
        return Choice(first, scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """The two drawn, the better one first."""
        view = situation.view
        drawn = [index for index in (choice.first, choice.second) if index is not None]
        compared = " and ".join(f"{view.names[i]} with {view.requests[i]:.0f}" for i in drawn)
        return f"fewest requests in flight of those drawn: {compared}"
