"""``completion``: where the request is predicted to finish soonest."""

import random

from extproc.predict.completion import Prediction
from extproc.route.comparison import compare
from extproc.route.policy import Choice, Situation, lowest, near_lowest

_NEAR_TIE = 0.1
"""Scores this close are as good as equal: about the error of a prediction."""
SAME_TTFT = 0.02
"""Times to first token this close are."""


class Completion:
    """Lowest ``completion + w·cost to others + avoidable prefill``; among near ties, the soonest
    first token.

    A replica with much KV space is filled for the sake of this request alone; the fuller it gets,
    the more the time that the others lose counts, since it is then that everyone waits: w is the
    square of the KV pressure. To count less than all of that time is for the sake of the first
    token: it keeps long prompts from queueing behind each other, away from those who decode. Where
    the first token takes as long as all others, as with short answers to long prompts, the
    completion counts it already: w is at least time to first token ÷ decode time, up to 1, and a
    near tie has to be nearer.
    """

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """Of the replicas with about the lowest score, the one with the soonest first token."""
        prediction = situation.prediction
        cost_to_others = prediction.cost_weight * prediction.cost_to_others
        scores = prediction.completion + cost_to_others + prediction.avoidable
        near = near_lowest(scores, _band(prediction))
        if len(near) == 1:
            return Choice(int(near[0]), scores)
        ttft = prediction.ttft[near]
        return Choice(int(near[lowest(ttft, random, SAME_TTFT)]), scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """Beside the next best and the one with the fewest requests."""
        return compare(situation, choice, _band(situation.prediction), SAME_TTFT)


def _band(prediction: Prediction) -> float:
    return _NEAR_TIE * (1.0 - prediction.first_token_share)
