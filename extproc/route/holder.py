"""For a request that goes on from a stored response: the replica that holds it."""

import random

import numpy as np

from extproc.route.policy import Choice, Situation


class Holder:
    """No replica but the one that holds the response; any other would answer 404."""

    NAME = "holder"
    """In decisions, where they name a policy."""

    def __init__(self, replica: str) -> None:
        """Takes ``ip:port`` of the one, which has to be a candidate."""
        self._replica = replica

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """That one, and no second choice."""
        first = situation.view.ids.index(self._replica)
        scores = np.full(len(situation.view), np.inf)
        scores[first] = situation.prediction.completion[first]
        return Choice(first, scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """Which response it holds."""
        return f"it holds {situation.profile.previous_response}, which the request goes on from"
