"""What clients saw of a server beside what the simulator makes of the same requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.fit.recording import Request

TIMES: dict[str, Callable[[Request], float]] = {
    "ttft": lambda request: request.ttft_s,
    "completion": lambda request: request.completion_s,
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One kind of time over all requests of a run, in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One kind of time, real and simulated."""

    real: Figures
    simulated: Figures
    errors: Figures
    """Simulated against real, of each figure: 0.1 is 10% too long."""
    request_error: float
    """Median over the requests of the error without its sign."""


def compare(real: Sequence[Request], simulated: Sequence[Request]) -> dict[str, Comparison]:
    """By kind of time; the requests are the same, in the same order."""
    return {
        name: _compare([time(one) for one in real], [time(one) for one in simulated])
        for name, time in TIMES.items()
    }


def _compare(real: Sequence[float], simulated: Sequence[float]) -> Comparison:
    ours, theirs = _figures(simulated), _figures(real)
    return Comparison(
        real=theirs,
        simulated=ours,
        errors=Figures(
            *(getattr(ours, name) / getattr(theirs, name) - 1.0 for name in Figures.__slots__)
        ),
        request_error=float(np.median(np.abs(np.array(simulated) / np.array(real) - 1.0))),
    )


def _figures(times: Sequence[float]) -> Figures:
    return Figures(float(np.mean(times)), *np.percentile(times, (50, 95, 99)).tolist())
