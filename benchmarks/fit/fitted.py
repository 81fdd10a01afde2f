"""What the simulator makes of a recording."""

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.fit.calibrate import measured
from benchmarks.fit.compare import Comparison, compare
from benchmarks.fit.learn import learned
from benchmarks.fit.recording import Limits, Recording, Request, Run
from benchmarks.fit.replay import Timing, replay

MEASURED, LEARNED = "measured", "learned"
"""Timings: of the requests that were sent for it, or learned by the product from the counters."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """A run as it would have been with a timing."""

    timing: Timing
    requests: list[Request]
    comparisons: dict[str, Comparison]
    """By kind of time."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A run, and what the simulator makes of it."""

    run: Run
    simulated: dict[str, Simulated]
    """By timing."""

    def to_json(self) -> dict[str, Any]:
        """All figures, and every request."""
        return {
            "name": self.run.name,
            "requests": [asdict(request) for request in self.run.requests],
            "simulated": {name: asdict(one) for name, one in self.simulated.items()},
        }


def fit(recorded: Recording) -> list[Fitted]:
    """Play all runs. No latency of theirs is used for it, but their counters are."""
    timing = measured(recorded.calibration.requests)
    return [
        Fitted(
            run,
            {
                MEASURED: _simulate(run, timing, recorded.limits),
                LEARNED: _simulate(run, learned(run.polls), recorded.limits),
            },
        )
        for run in recorded.runs
    ]


def _simulate(run: Run, timing: Timing, limits: Limits) -> Simulated:
    requests = replay(run.requests, timing, limits)
    return Simulated(timing, requests, compare(run.requests, requests))
