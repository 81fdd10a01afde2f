"""Figures of a simulation, as JSON and as a table."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.discrete import FleetSimulation
from benchmarks.fleet import imbalance
from extproc.lab.replay import Traced
from extproc.lab.replay.figures import FIGURES, distribution
from extproc.lab.replay.routers import Failed, Served

Run = dict[str, Any]  # figures of a run, in the form of the JSON; times in seconds
TIMES = ("ttft_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class CountedPhase:
    """Part of a run that counts: requests that arrived from ``start`` on and before ``end``."""

    start: float = 0.0
    end: float = inf

    def __str__(self) -> str:
        until = "on" if self.end == inf else f"to {self.end:g} s"
        return f"requests that arrived from {self.start:g} s {until}"

    def has(self, request: Traced) -> bool:
        return self.start <= request.at < self.end


def summary(
    simulation: FleetSimulation, served: Sequence[Served], phase: CountedPhase | None = None
) -> Run:
    """Figures of a run. TTFT is that of streamed requests: clients see no other first token.
    Raises ValueError if no request of the phase was answered."""
    phase = phase or CountedPhase()
    served = [request for request in served if phase.has(request.traced)]
    failed = [request for request in simulation.failed if phase.has(request.traced)]
    if not served:
        raise ValueError(f"{simulation.policy}: none of the {phase} was answered")
    e2e = np.array([request.completion for request in served])
    predicted = np.array([request.decision.predicted_completion for request in served])
    since_sent = e2e - np.array([request.queued_s for request in served])
    stays = (
        (request.replica, request.sent, request.traced.at + request.completion)
        for request in served
    )
    every = _work(served, failed)
    return {
        "policy": simulation.policy,
        "phase_s": [phase.start, None if phase.end == inf else phase.end],
        "requests": len(served),
        "failed": len(failed),
        "ttft_s": distribution([request.ttft for request in served if request.profile.stream]),
        "e2e_s": distribution(e2e),
        "hits": every["cached_tokens"] / every["prompt_tokens"],
        "imbalance": imbalance(stays, simulation.fleet_file.speeds),
        "preemptions": every["preemptions"],
        "prediction": {
            "e2e_mape": float(np.median(np.abs(predicted - since_sent) / since_sent)),
            "rank_corr": rank_correlation(predicted, since_sent),
        },
        "groups": _groups(served),
        "per_replica": {
            name: _work(
                [request for request in served if request.replica == name],
                [request for request in failed if request.replica == name],
            )
            for name in simulation.machines
        },
    }


def requests_of(
    simulation: FleetSimulation, served: Iterable[Served], phase: CountedPhase
) -> list[dict[str, Any]]:
    """Records of all requests for the JSON; ``counted`` is false for those outside the phase."""
    records = [(request.traced, _served(request, simulation.policy)) for request in served]
    for failed in simulation.failed:
        at_s = failed.traced.at
        failure = {"error": "failed", "failed_after_s": failed.at - at_s}
        records.append(
            (failed.traced, {"at_s": at_s, **failure, "replica": failed.replica or None})
        )
    return [record | {"counted": phase.has(traced)} for traced, record in records]


def header() -> str:
    names = "".join(f"{name:>8}" for name in FIGURES)
    return (
        f"{'':18}{'TTFT s':^32}   {'completion s':^32}   error  × the oracle's"
        f"   prefix\n"
        f"{'policy':18}{names}   {names}           mean    p99     hits  imbalance  failed    took"
    )


def row(run: Run, took: float) -> str:
    """Line of the table for a run, then a line for each group; ``took``: CPU seconds."""
    name = f"oracle (cost ×{run['weight']:g})" if "weight" in run else run["policy"]
    gap = run.get("to_oracle")
    distance = f"{gap['e2e_s']['mean']:7.2f}{gap['e2e_s']['p99']:7.2f}" if gap else " " * 14
    line = (
        f"{name:18}{_times(run)}  {run['prediction']['e2e_mape']:6.0%} {distance}"
        f"{run['hits']:9.0%}{run['imbalance']:11.2f}{run['failed']:8}{took:7.1f}s"
    )
    for name, group in run["groups"].items():
        line += f"\n  {name:16}{_times(group)}  {group['in_time']:6.1%} in time"
    return line


def _times(figures: Run) -> str:
    return "   ".join(
        "".join(f"{times[name]:8.3f}" if times else f"{'–':>8}" for name in FIGURES)
        for times in (figures[key] for key in TIMES)
    )


def _groups(served: Iterable[Served]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Served]] = defaultdict(list)
    for request in served:
        groups[_group(request)].append(request)
    if len(groups) < 2 and "target" not in groups:
        return {}
    return {
        group or "others": {
            "requests": len(members),
            "in_time": sum(map(_in_time, members)) / len(members),
            "ttft_s": distribution([each.ttft for each in members if each.profile.stream]),
            "e2e_s": distribution([each.completion for each in members]),
        }
        for group, members in sorted(groups.items())
    }


def _group(request: Served) -> str:
    """Group of the request in figures: its objective or, without one, its tenant."""
    return request.arrival.objective.name or request.profile.tenant


def _in_time(request: Served) -> bool:
    objective = request.arrival.objective
    return request.ttft <= objective.ttft_s and request.completion <= objective.completion_s


def _served(request: Served, policy: str) -> dict[str, Any]:
    """Record of a request. Predictions of the oracle are left out, because no router could make
    them."""
    predicted = None if policy == "oracle" else request.decision
    return {
        "at_s": request.traced.at,
        "prompt_tokens": request.traced.prompt_tokens,
        "output_tokens": request.traced.output_tokens,
        "group": _group(request),
        "streamed": request.profile.stream,
        "queued_s": request.queued_s,
        "ttft_s": request.ttft,
        "completion_s": request.completion,
        "replica": request.replica,
        "predicted_ttft_s": predicted and predicted.predicted_ttft,
        "predicted_completion_s": predicted and predicted.predicted_completion,
    }


def _work(served: Sequence[Served], failed: Sequence[Failed]) -> dict[str, int]:
    return {
        "requests": len(served),
        "failed": len(failed),
        "prompt_tokens": sum(request.traced.prompt_tokens for request in served),
        "cached_tokens": sum(request.sequence.cached_tokens for request in served),
        "generated_tokens": sum(request.traced.output_tokens for request in served),
        "preemptions": sum(request.sequence.preemptions for request in served),
    }


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Return Spearman's rank correlation."""
    ranks = np.array([np.argsort(np.argsort(values)) for values in (first, second)])
    return float(np.corrcoef(ranks)[0, 1])
