"""What every policy meets and gives."""

import random
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from extproc.fleet.prefixes import Held
from extproc.predict.completion import AdapterTimes, Prediction
from extproc.predict.inputs import FleetView, Floats, Indices, Sequences, least
from extproc.request.profile import RequestProfile


@dataclass(slots=True)
class Situation:
    """A request and the fleet at the moment it came."""

    profile: RequestProfile
    view: FleetView
    held: Held
    prediction: Prediction
    sequences: Sequences
    """What is in flight on the candidates; good until the fleet changes."""
    adapter: AdapterTimes | None = None
    """What it meets where it asks for a LoRA adapter."""

    @property
    def cached_share(self) -> Floats:
        """Share of the prompt that each candidate should have in its prefix cache, 0…1.

        By what was sent there alone, as other routers know it.
        """
        return self.held.expected / max(self.profile.prompt_tokens, 1)


@dataclass(slots=True)
class Choice:
    """What a policy chose: indices into the view."""

    first: int
    scores: Floats
    """Per candidate, lower is better; what a score means is the policy's own matter."""

    @property
    def second(self) -> int | None:
        """The next best, for a retry; None where no other candidate could serve it."""
        return runner_up(self.scores, self.first)


class Policy(Protocol):
    """Chooses a replica among at least one candidate."""

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica for this request."""
        ...

    def why(self, situation: Situation, choice: Choice) -> str:
        """The reason for a choice it made, for people; made only when somebody looks."""
        ...


def lowest(scores: Floats, random: random.Random, band: float = 0.0) -> int:
    """The index of the lowest score, at random among those within a fraction ``band`` of it.

    Replicas that are as good as equal share the work: always taking the first of them would herd
    every request onto it until the next poll.
    """
    near = near_lowest(scores, band)
    return int(near[0] if len(near) == 1 else near[random.randrange(len(near))])


def near_lowest(scores: Floats, band: float = 0.0) -> Indices:
    """The indices of the scores within a fraction ``band`` of the lowest."""
    return (scores <= least(scores) * (1.0 + band)).nonzero()[0]


def runner_up(scores: Floats, first: int) -> int | None:
    """The index of the lowest score but for ``first``; None where no other is finite."""
    others = scores.copy()
    others[first] = np.inf
    second = int(others.argmin())
    return second if others[second] < np.inf else None
