"""For a request with a target: a replica that meets it, and leaves the better ones to others."""

import random

import numpy as np

from extproc.predict.completion import Prediction
from extproc.predict.correction import Margins
from extproc.predict.inputs import Floats
from extproc.request.objective import Objective
from extproc.route.comparison import seconds
from extproc.route.policy import Choice, Policy, Situation, lowest

_OWN = 0.5
"""Seconds of others that a second of its own is worth, where it has a target for that."""


def lateness(
    objective: Objective, prediction: Prediction, margins: Margins, waited: float
) -> Floats:
    """Seconds by which each candidate misses the target that it misses by most, if it takes as long
    as one request of ten does; below zero: to spare.

    ``waited``: seconds since the request came.
    """
    later = max(prediction.output_tokens - 1.0, 0.0)
    times = (
        (prediction.ttft, margins.ttft, objective.ttft_s - waited),
        (prediction.decode, margins.tpot, objective.tpot_s * later if later else np.inf),
        (prediction.completion, margins.completion, objective.completion_s - waited),
    )
    late = [time * margin.ratio - target for time, margin, target in times if target < np.inf]
    worst: Floats = np.max([np.full(len(prediction.ttft), -np.inf), *late], axis=0)
    return worst


class Target:
    """Of the replicas that meet the target, one that costs others little; another policy chooses
    where none does.

    Where a target says how long the request may decode, ``own/2 + cost to others + avoidable
    prefill`` decides, own being its completion: it leaves the fast replicas to requests that have
    no such target. Where its first token alone has one, the other policy's choice is taken unless
    that is late. To go by lateness where none is in time would fill the replica with the soonest
    first token with what is late anyway: all requests would take 4% longer, and no more of them
    be in time (azure-2023-conv at 8 times its speed on ``mixed``).
    """

    NAME = "target"
    """In decisions, where they name a policy."""

    def __init__(self, late: Floats, otherwise: Policy) -> None:
        """One request's.

        Args:
            late: as :func:`lateness` says.
            otherwise: chooses where none is in time.
        """
        self._late = late
        self._otherwise = otherwise

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """A replica that meets the target; the second is the other policy's, at any rate."""
        choice, meets = self._otherwise.choose(situation, random), self._late <= 0.0
        bounded = situation.profile.objective.bounds_end
        if not meets.any() or (meets[choice.first] and not bounded):
            return choice
        scores, prediction = choice.scores, situation.prediction
        if bounded:
            scores = _OWN * prediction.completion + prediction.cost_to_others + prediction.avoidable
        elif not (meets & (scores < np.inf)).any():  # it drew others
            scores = prediction.completion
        return Choice(lowest(np.where(meets, scores, np.inf), random), choice.scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """How many meet the target, and by how much this one does."""
        late, name = self._late.item(choice.first), situation.view.names[choice.first]
        if late > 0.0:
            return f"no replica meets its target; {self._otherwise.why(situation, choice)}"
        ends = seconds(situation.prediction.completion.item(choice.first))
        cost = seconds(situation.prediction.cost_to_others.item(choice.first))
        meet = f"{(self._late <= 0.0).sum()} of {len(self._late)} meet its target"
        return (
            f"{meet}; {name} finishes it in {ends}, with {seconds(-late)} to spare, and it costs "
            f"the requests in flight there {cost} in all"
        )
