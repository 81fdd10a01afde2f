"""One request of a simulation and what came of it."""

from dataclasses import dataclass

from benchmarks.trace import TracedRequest
from extproc.request.objective import NO_OBJECTIVE, Objective
from extproc.request.profile import RequestProfile
from extproc.route.router import Decision
from extproc.simulator.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that came."""

    number: int
    traced: TracedRequest
    sequence: Sequence
    objective: Objective
    """What it aims for, whether the router knows or not."""


@dataclass(slots=True)
class Served:
    """A request that was sent to a replica."""

    number: int
    traced: TracedRequest
    decision: Decision
    watched: bool
    """Whether the router reads the response's chunks."""
    replica: str
    """Where it is, after a retry."""
    sequence: Sequence
    objective: Objective = NO_OBJECTIVE
    sent: float = 0.0
    """When it was, after it may have waited at the router."""
    answered: bool = False
    """Whether response headers came: from then on there is no retry."""
    retried: bool = False
    first_token: float | None = None
    finished: float | None = None
    """When it was complete; None while it is not, or where it failed."""

    @property
    def profile(self) -> RequestProfile:
        return self.decision.profile

    @property
    def ttft(self) -> float:
        assert self.first_token is not None
        return self.first_token - self.traced.at

    @property
    def completion(self) -> float:
        assert self.finished is not None
        return self.finished - self.traced.at

    @property
    def in_time(self) -> bool:
        """Whether it met its targets."""
        aim = self.objective
        return self.ttft <= aim.ttft_s and self.completion <= aim.completion_s

    @property
    def group(self) -> str:
        """What it is told apart by in the figures: its objective, or its tenant."""
        return self.objective.name or self.profile.tenant


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that got no whole answer."""

    traced: TracedRequest
    replica: str
    """Where it was last; empty where none was known to work."""
    at: float
