"""For a request of a session: the replica that had its last one, unless that takes too long."""

import random
from math import inf

from extproc.predict.inputs import least
from extproc.route.comparison import seconds
from extproc.route.policy import Choice, Policy, Situation


class Session:
    """Stays where the session is if the request is finished there soon enough; another policy
    chooses where it is not."""

    NAME = "session"
    """In decisions, where they name a policy."""

    def __init__(self, replica: str, most_s: float, otherwise: Policy) -> None:
        """A session's next request.

        Args:
            replica: ``ip:port`` of the one that has the session; it may be no candidate.
            most_s: seconds by which it may be finished later than on the best.
            otherwise: chooses where it cannot stay.
        """
        self._replica = replica
        self._most_s = most_s
        self._otherwise = otherwise

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The session's replica, or the other policy's choice; that is the second, at any rate."""
        choice = self._otherwise.choose(situation, random)
        if self._later(situation) > self._most_s:
            return choice
        return Choice(situation.view.ids.index(self._replica), choice.scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """How much later it is finished there, or would be."""
        later, view = self._later(situation), situation.view
        if later <= self._most_s:
            much = (
                f"{seconds(later)} later than on the best" if later else "no later than elsewhere"
            )
            return f"its session is there, and it is finished {much}"
        reason = self._otherwise.why(situation, choice)
        if later == inf:
            return f"its session was on {self._replica}, which cannot serve it now; {reason}"
        name = view.names[view.ids.index(self._replica)]
        late = f"finished {seconds(later)} later than on the best"
        return f"its session was on {name}, where it would be {late}; {reason}"

    def _later(self, situation: Situation) -> float:
        """Seconds that the session's replica takes more than the best; infinite where it cannot."""
        view, completion = situation.view, situation.prediction.completion
        if self._replica not in view.ids:
            return inf
        there = float(completion[view.ids.index(self._replica)])
        return inf if there == inf else there - least(completion)
