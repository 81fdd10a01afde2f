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
        compared = " and ".join(f"{view.requests[i]:.0f} ({view.names[i]})" for i in drawn)
        return Choice(first, scores, f"requests in flight, two drawn: {compared}")
