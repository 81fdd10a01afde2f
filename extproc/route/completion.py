"""``completion``: where the request is predicted to finish soonest."""

import random

from extproc.route.policy import Choice, Situation, lowest, runner_up

_BAND = 0.02
"""Scores this close are as good as equal: well below the 6% error of the step-time model."""


class Completion:
    """Lowest ``completion + ρ·cost to others``, ρ being the KV pressure after admission.

    A replica with much KV space is filled for the sake of this request alone; the fuller it gets,
    the more the time that the others lose counts, since it is then that everyone waits. With ρ = 1
    throughout, the mean near saturation is as good, but the first token at moderate load comes
    later.
    """

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica with the lowest score, at random among near ties."""
        prediction, view = situation.prediction, situation.view
        completion = prediction.completion
        scores = completion + prediction.kv_pressure * prediction.cost_to_others
        first = lowest(scores, random, band=_BAND * float(scores.min()))
        why = f"finishes in {completion[first]:.2f}s"
        second = runner_up(scores, first)
        if second is not None:
            why += f", {view.names[second]} in {completion[second]:.2f}s"
        return Choice(first, scores, why)
