"""One decision: the fleet as it is, a prediction for every candidate, a policy's choice."""

import random
from dataclasses import dataclass

from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import UNBOUNDED
from extproc.predict.completion import Prediction, predict
from extproc.request.profile import RequestProfile
from extproc.route.policies import POLICIES
from extproc.route.policy import Choice, Policy, Situation, find_policy


@dataclass(frozen=True, slots=True)
class Decision:
    """Which replica gets a request, and everything the choice was made from."""

    policy: str
    situation: Situation
    choice: Choice

    @property
    def replica(self) -> str:
        """``ip:port`` of the replica chosen."""
        return self.situation.view.ids[self.choice.first]

    @property
    def second(self) -> str | None:
        """``ip:port`` of the second choice, for a retry."""
        second = self.choice.second
        return None if second is None else self.situation.view.ids[second]

    @property
    def profile(self) -> RequestProfile:
        """The request it is about."""
        return self.situation.profile

    @property
    def prediction(self) -> Prediction:
        """Predicted times of every candidate."""
        return self.situation.prediction

    @property
    def predicted_ttft(self) -> float:
        """Seconds to the first token on the replica chosen."""
        return float(self.prediction.ttft[self.choice.first])

    @property
    def predicted_completion(self) -> float:
        """Seconds to the last token on the replica chosen."""
        return float(self.prediction.completion[self.choice.first])


class Router:
    """Chooses replicas with one policy, or with another that a request asks for."""

    def __init__(self, fleet: Fleet, policy: str, random: random.Random) -> None:
        """Raises ValueError where no policy has that name."""
        self.fleet = fleet
        self._default = policy
        self._random = random
        self._policies: dict[str, Policy] = {policy: find_policy(policy, POLICIES)}

    def decide(self, profile: RequestProfile, policy: str = "") -> Decision | None:
        """The decision for a request; None where no healthy replica is known.

        Args:
            profile: the request.
            policy: name of a policy for this request alone; one that does not exist is passed over.
        """
        fleet = self.fleet
        view = fleet.view(profile.model)
        if not len(view):
            return None
        expected = self._expected_output(profile)
        prediction = predict(profile, expected, view, fleet.sequences(view))
        situation = Situation(profile, view, prediction)
        name = policy if policy in POLICIES else self._default
        if name not in self._policies:
            self._policies[name] = find_policy(name, POLICIES)
        choice = self._policies[name].choose(situation, self._random)
        return Decision(name, situation, choice)

    def _expected_output(self, profile: RequestProfile) -> float:
        if not profile.sequences:
            return 0.0
        lengths = self.fleet.lengths
        bound = UNBOUNDED if profile.output_bound is None else profile.output_bound
        return lengths.expected(lengths.row(profile.model, profile.endpoint), bound)
