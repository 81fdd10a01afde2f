"""What a simulation says in figures: as JSON, and as a table for people."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import numpy as np

from benchmarks.discrete import Simulation
from benchmarks.imbalance import imbalance
from benchmarks.served import Failed, Served
from benchmarks.trace import TracedRequest
from extproc.predict.inputs import Floats

Run = dict[str, Any]
"""One run's figures, in the form of the JSON report; times in seconds."""

_FIGURES = ("mean", "p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run: the requests that arrived from ``start`` on and before ``end``."""

    start: float = 0.0
    end: float = inf

    def __str__(self) -> str:
        until = "on" if self.end == inf else f"to {self.end:g} s"
        return f"requests that arrived from {self.start:g} s {until}"

    def served(self, requests: Sequence[Served]) -> list[Served]:
        """Those of the phase."""
        return [one for one in requests if self.has(one.traced)]

    def failed(self, requests: Sequence[Failed]) -> list[Failed]:
        """Those of the phase."""
        return [one for one in requests if self.has(one.traced)]

    def has(self, request: TracedRequest) -> bool:
        """Whether it arrived then."""
        return self.start <= request.at < self.end


def summary(simulation: Simulation, served: Sequence[Served], phase: Phase | None = None) -> Run:
    """One run in figures.

    Raises:
        ValueError: no request of the phase was answered.
    """
    phase = phase or Phase()
    served, failed = phase.served(served), phase.failed(simulation.failed)
    if not served:
        raise ValueError(f"{simulation.policy}: no request of that time was answered")
    ttft = np.array([request.ttft for request in served])
    e2e = np.array([request.completion for request in served])
    predicted_ttft = np.array([request.decision.predicted_ttft for request in served])
    predicted = np.array([request.decision.predicted_completion for request in served])
    return {
        "policy": simulation.policy,
        "phase_s": [phase.start, None if phase.end == inf else phase.end],
        "requests": len(served),
        "failed": len(failed),
        "ttft_s": _distribution(ttft),
        "e2e_s": _distribution(e2e),
        "hits": sum(request.sequence.cached_tokens for request in served)
        / sum(request.traced.prompt_tokens for request in served),
        "imbalance": imbalance(
            ((one.replica, one.traced.at, one.traced.at + one.completion) for one in served),
            simulation.fleet_file.speeds,
        ),
        "preemptions": sum(request.sequence.preemptions for request in served),
        "prediction": {
            "ttft_mape": _median_error(predicted_ttft, ttft),
            "e2e_mape": _median_error(predicted, e2e),
            "rank_corr": _rank_correlation(predicted, e2e),
        },
        "learned_speed": [asdict(one) for one in simulation.speeds.learned],
        "per_replica": {
            name: _of_replica(
                [request for request in served if request.replica == name],
                [request for request in failed if request.replica == name],
            )
            for name in simulation.machines
        },
    }


def requests_of(
    simulation: Simulation, served: Sequence[Served], phase: Phase
) -> list[dict[str, Any]]:
    """Every request for the JSON; those outside the phase are there as load, and not counted."""
    return [
        _served(one, simulation.policy) | {"counted": phase.has(one.traced)} for one in served
    ] + [_failed(one) | {"counted": phase.has(one.traced)} for one in simulation.failed]


def distance(run: Run, oracle: Run) -> Run:
    """Each figure over the oracle's."""
    return {
        part: {name: run[part][name] / oracle[part][name] for name in _FIGURES}
        for part in ("ttft_s", "e2e_s")
    }


def header() -> str:
    """The table's."""
    names = "".join(f"{name:>8}" for name in _FIGURES)
    return (
        f"{'':18}{'TTFT s':^32}   {'completion s':^32}   error  × the oracle's"
        f"   prefix\n"
        f"{'policy':18}{names}   {names}           mean    p99     hits  imbalance  failed    took"
    )


def row(run: Run, took: float) -> str:
    """One run's line of the table, and a line for each change of speed it had to learn."""
    figures = "   ".join(
        "".join(f"{run[part][name]:8.3f}" for name in _FIGURES) for part in ("ttft_s", "e2e_s")
    )
    gap = run.get("to_oracle")
    distance = f"{gap['e2e_s']['mean']:7.2f}{gap['e2e_s']['p99']:7.2f}" if gap else " " * 14
    line = (
        f"{_label(run):18}{figures}  {run['prediction']['e2e_mape']:6.0%} {distance}"
        f"{run['hits']:9.0%}{run['imbalance']:11.2f}{run['failed']:8}{took:7.1f}s"
    )
    return "\n".join([line, *map(_learned, run["learned_speed"])])


def _served(one: Served, policy: str) -> dict[str, Any]:
    """The oracle predicts nothing that a router could."""
    predicted = None if policy == "oracle" else one.decision
    return {
        "at_s": one.traced.at,
        "prompt_tokens": one.traced.prompt_tokens,
        "output_tokens": one.traced.output_tokens,
        "ttft_s": one.ttft,
        "completion_s": one.completion,
        "replica": one.replica,
        "predicted_ttft_s": predicted and predicted.predicted_ttft,
        "predicted_completion_s": predicted and predicted.predicted_completion,
    }


def _failed(one: Failed) -> dict[str, Any]:
    return {
        "at_s": one.traced.at,
        "error": "failed",
        "failed_after_s": one.at - one.traced.at,
        "replica": one.replica or None,
    }


def _label(run: Run) -> str:
    return f"oracle (cost ×{run['weight']:g})" if "weight" in run else str(run["policy"])


def _learned(change: dict[str, Any]) -> str:
    return (
        f"  {change['replica']} at {change['at']:.0f} s, now {change['slow']:g}× as slow as its "
        f"profile: its steps are believed to take {change['ratio']:.2f}× the truth"
    )


def _of_replica(served: Sequence[Served], failed: Sequence[Failed]) -> dict[str, int]:
    return {
        "requests": len(served),
        "failed": len(failed),
        "prompt_tokens": sum(request.traced.prompt_tokens for request in served),
        "cached_tokens": sum(request.sequence.cached_tokens for request in served),
        "generated_tokens": sum(request.traced.output_tokens for request in served),
        "preemptions": sum(request.sequence.preemptions for request in served),
    }


def _distribution(seconds: Floats) -> dict[str, float]:
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]).tolist()
    return {"mean": float(seconds.mean()), "p50": p50, "p95": p95, "p99": p99}


def _median_error(predicted: Floats, actual: Floats) -> float:
    return float(np.median(np.abs(predicted - actual) / actual))


def _rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's."""
    ranks = np.stack([values.argsort().argsort() for values in (a, b)]).astype(np.float64)
    ranks -= ranks.mean()
    return float((ranks[0] * ranks[1]).mean() / (ranks[0] ** 2).mean())
