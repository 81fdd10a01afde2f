"""Requests of a simulation, their outcomes, and the clock of the simulation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from extproc.lab.simulator.steps import Sequence
from extproc.request.objective import Objective
from extproc.request.profile import RequestProfile
from extproc.route.router import Decision


class VirtualClock:
    """Reads as it was last set."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Traced(Protocol):
    """A request as a trace or a record has it."""

    @property
    def at(self) -> float:
        """Seconds from the start."""

    @property
    def prompt_tokens(self) -> int:
        """As an engine counts them."""

    @property
    def output_tokens(self) -> int:
        """What each of its sequences will generate; no policy may see it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that came."""

    number: int
    traced: Traced
    profile: RequestProfile  # what the router knows of it
    objective: Objective  # what it aims for, whether the router knows or not
    sequences: Callable[[int], list[Sequence]]
    """What an engine with KV blocks of so many tokens makes of it, anew for each that gets it; at
    least one."""
    among: frozenset[str] | None = None  # the only replicas that it may be sent to; None: any


@dataclass(slots=True)
class Served:
    """A request that was sent to a replica."""

    arrival: Arrival
    decision: Decision
    watched: bool  # whether the router reads the response's chunks
    replica: str  # where it is, after a retry
    sent: float  # when it was, after it may have waited at the router
    sequences: list[Sequence] = field(default_factory=list)  # there
    frontend: float = 0.0  # seconds that it takes there outside of the engine's steps
    answered: bool = False  # whether response headers came: from then on there is no retry
    retried: bool = False
    first_token: float | None = None
    finished: float | None = None  # when it was complete; None while it is not, or where it failed

    @property
    def number(self) -> int:
        return self.arrival.number

    @property
    def traced(self) -> Traced:
        return self.arrival.traced

    @property
    def sequence(self) -> Sequence:
        return self.sequences[0]

    @property
    def profile(self) -> RequestProfile:
        return self.decision.profile

    @property
    def prefill_seen(self) -> bool:
        """Whether the router knows that its prompt was computed."""
        first_seen = self.profile.stream and self.first_token is not None
        return self.watched and (first_seen or self.finished is not None)

    @property
    def ttft(self) -> float:
        """Seconds from its arrival to its first token."""
        assert self.first_token is not None
        return self.first_token - self.traced.at + self.frontend

    @property
    def completion(self) -> float:
        assert self.finished is not None
        return self.finished - self.traced.at + self.frontend

    @property
    def in_time(self) -> bool:
        aim = self.arrival.objective
        return self.ttft <= aim.ttft_s and self.completion <= aim.completion_s

    @property
    def group(self) -> str:
        """What it is told apart by in the figures: its objective, or its tenant."""
        return self.arrival.objective.name or self.profile.tenant


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that got no whole answer."""

    traced: Traced
    replica: str  # where it was last; empty where none was known to work
    at: float
