"""Discrete-event simulation: the production router against the simulator's engines."""

import random
from collections.abc import Iterator
from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.fleet import FleetFile
from benchmarks.trace import TracedRequest
from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.fleet.state import ReplicaState
from extproc.fleet.view import Floats
from extproc.predict.calibration import Calibration, EngineCounts
from extproc.predict.hardware import HardwareProfile
from extproc.predict.lengths import OutputLengths
from extproc.predict.step import StepModel
from extproc.request.profile import Endpoint, RequestProfile
from extproc.route.router import Decision, Router
from extproc.simulator.engine import Engine
from extproc.simulator.sequence import Sequence
from extproc.simulator.steps import Outcome

MODEL = "model"
KNOWN = ("lengths", "coefficients")
STREAMED = 0.5
"""Share of requests that are streamed."""
STREAM_SAMPLE = 0.1
"""Share of streams whose chunks the router reads, as configured by default."""
_MAX_MODEL_LEN = 131_072


class TrueLengths(OutputLengths):
    """Output lengths that are known: every request generates its bound."""

    def expected(self, row: int, bound: float) -> float:
        return bound

    def remaining(self, rows: ArrayLike, progress: ArrayLike, bound: ArrayLike) -> Floats:
        left: Floats = np.maximum(np.subtract(bound, progress, dtype=np.float64), 0.0)
        return left


class VirtualClock:
    """Time that the simulation sets."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@dataclass(slots=True)
class Served:
    """One request and what came of it."""

    traced: TracedRequest
    sequence: Sequence
    decision: Decision
    ticket: Ticket
    watched: bool
    """Whether the router reads the response's chunks."""

    @property
    def ttft(self) -> float:
        assert self.sequence.first_token is not None
        return self.sequence.first_token - self.traced.at

    @property
    def completion(self) -> float:
        assert self.sequence.finished is not None
        return self.sequence.finished - self.traced.at


@dataclass
class Simulation:
    """One policy on one fleet and one trace."""

    fleet_file: FleetFile
    policy: str
    poll_interval: float = 0.2
    seed: int = 0
    know: frozenset[str] = frozenset()
    """Which of ``KNOWN`` the router is told, though production would not know it."""
    profile_error: float = 1.0
    """How many times as long as in truth a step takes by the profile the router starts from."""
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        lengths = TrueLengths() if "lengths" in self.know else OutputLengths()
        self.fleet = Fleet(lengths, self.clock)
        self.router = Router(self.fleet, self.policy, random.Random(self.seed))
        members = self.fleet_file.members
        self.engines = {name: Engine(profile) for name, profile in members.items()}
        self._calibrations = {
            name: Calibration(self._believed(profile)) for name, profile in members.items()
        }
        self._open: dict[int, Served] = {}

    def run(self, trace: PySequence[TracedRequest]) -> Iterator[Served]:
        """Plays the trace; yields every request when it has finished."""
        last = trace[-1].at if trace else 0.0
        arrivals = iter(trace)
        upcoming = next(arrivals, None)
        poll_at = 0.0
        while upcoming is not None or self._open:
            if upcoming is not None and upcoming.at < poll_at:
                yield from self._advance(upcoming.at)
                self._arrive(upcoming)
                upcoming = next(arrivals, None)
            else:
                yield from self._advance(poll_at)
                self._poll()
                poll_at += self.poll_interval
                if poll_at > last + 7200:
                    raise RuntimeError(f"{len(self._open)} requests do not end")

    def _arrive(self, traced: TracedRequest) -> None:
        streamed = self._random.random() < STREAMED
        profile = RequestProfile(
            Endpoint.CHAT,
            MODEL,
            traced.prompt_tokens,
            traced.prompt_tokens * 4,
            traced.output_tokens if "lengths" in self.know else traced.max_tokens,
            stream=streamed,
        )
        decision = self.router.decide(profile)
        assert decision is not None
        ticket = self.fleet.dispatch(decision.replica, profile)
        sequence = Sequence(ticket.number, traced.prompt_tokens, traced.output_tokens)
        watched = not streamed or self._random.random() < STREAM_SAMPLE
        self._open[ticket.number] = Served(traced, sequence, decision, ticket, watched)
        self.engines[decision.replica].add(sequence, traced.at)

    def _advance(self, until: float) -> Iterator[Served]:
        """Runs every engine up to a time; the router hears of what happened in its order."""
        happened = [
            outcome for engine in self.engines.values() for outcome in engine.advance(until)
        ]
        happened.sort(key=lambda outcome: outcome.ends_at)
        for outcome in happened:
            self.clock.time = outcome.ends_at
            yield from self._hear(outcome)
        self.clock.time = until

    def _hear(self, outcome: Outcome) -> Iterator[Served]:
        for sequence in outcome.prefilled:
            served = self._open[sequence.id]
            if served.watched and served.decision.profile.stream:
                self.fleet.first_token(served.ticket)
        for sequence in outcome.finished:
            served = self._open.pop(sequence.id)
            self.fleet.release(served.ticket, prefilled=served.watched)
            if served.watched:
                profile = served.decision.profile
                bound = inf if profile.output_bound is None else profile.output_bound
                self.fleet.lengths.observe(
                    profile.model, profile.endpoint, sequence.output_tokens, bound
                )
            yield served

    def _believed(self, profile: HardwareProfile) -> StepModel:
        return profile.step.slowed(self.profile_error)

    def _poll(self) -> None:
        for name, engine in self.engines.items():
            counters = engine.counters
            learned = None
            if "coefficients" not in self.know:
                calibration = self._calibrations[name]
                calibration.poll(
                    EngineCounts(
                        at=self.clock.time,
                        steps=engine.steps,
                        computed_tokens=counters.prompt_tokens - counters.cached_tokens,
                        generated_tokens=counters.generated_tokens,
                        in_flight=engine.running + engine.waiting,
                        kv_tokens=engine.kv_usage * engine.capacity,
                    )
                )
                learned = calibration.model or self._believed(engine.profile)
            self.fleet.put(
                ReplicaState.model_construct(
                    id=name,
                    name=name,
                    profile=engine.profile.name,
                    learned=learned,
                    models=(MODEL,),
                    max_model_len=_MAX_MODEL_LEN,
                    running=engine.running,
                    waiting=engine.waiting,
                    kv_usage=engine.kv_usage,
                    kv_tokens=engine.capacity,
                    steps=engine.steps,
                    prompt_tokens=counters.prompt_tokens,
                    cached_tokens=counters.cached_tokens,
                    generated_tokens=counters.generated_tokens,
                    preemptions=counters.preemptions,
                    scraped_at=self.clock.time,
                )
            )
