"""Overrides of the policy: the owner of the response that a request continues, its target
or its session, each with the policy as the alternative."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Protocol

import numpy as np

from extproc.predict.completion import Prediction
from extproc.predict.correction import Margins
from extproc.predict.inputs import Floats, least
from extproc.request.objective import Objective
from extproc.route.policies import Choice, Situation, choose, lowest
from extproc.route.reasons import seconds, why

_OWN = 0.5
"""Weight of a request's own completion against the seconds that others lose, where a target bounds
its end."""


class Chooser(Protocol):
    """Chooses a replica among at least one candidate."""

    @property
    def name(self) -> str: ...

    def choose(self, situation: Situation) -> Choice: ...

    def why(self, situation: Situation, choice: Choice) -> str:
        """The reason for a choice, for people; made only when somebody looks."""
        ...


@dataclass(frozen=True, slots=True)
class ByPolicy:
    """The candidate with the lowest score."""

    name: str

    def choose(self, situation: Situation) -> Choice:
        return choose(self.name, situation)

    def why(self, situation: Situation, choice: Choice) -> str:
        return why(self.name, situation, choice)


@dataclass(frozen=True, slots=True)
class Holder:
    """No replica but the one that holds the response; any other would answer 404."""

    replica: str  # ip:port; a candidate
    name: ClassVar[str] = "holder"

    def choose(self, situation: Situation) -> Choice:
        first = situation.view.ids.index(self.replica)
        scores = np.full(len(situation.view), np.inf)
        scores[first] = situation.prediction.completion[first]
        return Choice(first, scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        return f"it holds {situation.profile.previous_response}, which the request goes on from"


@dataclass(frozen=True, slots=True)
class Session:
    """Stays where the session is if the request is finished there soon enough."""

    replica: str  # ip:port; may be no candidate
    most_s: float  # seconds by which it may be finished later than on the best
    otherwise: Chooser  # where it cannot stay
    name: ClassVar[str] = "session"

    def choose(self, situation: Situation) -> Choice:
        """The session's replica, or the other choice; that is the second, at any rate."""
        choice = self.otherwise.choose(situation)
        if self._later(situation) > self.most_s:
            return choice
        return Choice(situation.view.ids.index(self.replica), choice.scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        later, view = self._later(situation), situation.view
        much = f"finished {seconds(later)} later than on the best"
        if later <= self.most_s:
            much = much if later else "finished no later than elsewhere"
            return f"its session is there, and it is {much}"
        reason = self.otherwise.why(situation, choice)
        if later == inf:
            return f"its session was on {self.replica}, which cannot serve it now; {reason}"
        name = view.names[view.ids.index(self.replica)]
        return f"its session was on {name}, where it would be {much}; {reason}"

    def _later(self, situation: Situation) -> float:
        """Seconds that the session's replica takes more than the best; infinite where it cannot."""
        view, completion = situation.view, situation.prediction.completion
        if self.replica not in view.ids:
            return inf
        there = float(completion[view.ids.index(self.replica)])
        return inf if there == inf else there - least(completion)


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


@dataclass(frozen=True, slots=True)
class Target:
    """Of the replicas that meet the target, one that costs others little.

    Where a target says how long the request may decode, ``own/2 + cost to others + avoidable
    prefill`` decides, own being its completion: it leaves the fast replicas to requests that have
    no such target. Where its first token alone has one, the other choice is taken unless that is
    late. To go by lateness where none is in time would fill the replica with the soonest first
    token with what is late anyway: all requests would take 4% longer, and no more of them be in
    time (azure-2023-conv at 8 times its speed on ``mixed``).
    """

    late: Floats  # from lateness()
    otherwise: Chooser  # where none is in time
    name: ClassVar[str] = "target"

    def choose(self, situation: Situation) -> Choice:
        """A replica that meets the target; the second is the other choice, at any rate."""
        choice, meets = self.otherwise.choose(situation), self.late <= 0.0
        bounded = situation.profile.objective.bounds_end
        if not meets.any() or (meets[choice.first] and not bounded):
            return choice
        scores, prediction = choice.scores, situation.prediction
        if bounded:
            scores = _OWN * prediction.completion + prediction.cost_to_others + prediction.avoidable
        elif not (meets & (scores < np.inf)).any():  # power_of_two drew others
            scores = prediction.completion
        best = lowest(np.where(meets, scores, np.inf), situation.random)
        return Choice(best, choice.scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        late, name = self.late.item(choice.first), situation.view.names[choice.first]
        if late > 0.0:
            return f"no replica meets its target; {self.otherwise.why(situation, choice)}"
        ends = seconds(situation.prediction.completion.item(choice.first))
        cost = seconds(situation.prediction.cost_to_others.item(choice.first))
        meet = f"{(self.late <= 0.0).sum()} of {len(self.late)} meet its target"
        return (
            f"{meet}; {name} finishes it in {ends}, with {seconds(-late)} to spare, and it costs "
            f"the requests in flight there {cost} in all"
        )
