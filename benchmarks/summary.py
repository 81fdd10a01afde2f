"""Figures of a simulation, as JSON and as a table."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import numpy as np

from benchmarks.discrete import Simulation
from benchmarks.fleet import imbalance
from extproc.lab.replay.figures import FIGURES, distribution, rank_correlation
from extproc.lab.replay.routers import Failed, Served, Traced

Run = dict[str, Any]  # one run's figures, in the form of the JSON report; times in seconds
PARTS = ("ttft_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a run: requests that arrived from ``start`` on and before ``end``."""

    start: float = 0.0
    end: float = inf

    def __str__(self) -> str:
        until = "on" if self.end == inf else f"to {self.end:g} s"
        return f"requests that arrived from {self.start:g} s {until}"

    def has(self, request: Traced) -> bool:
        return self.start <= request.at < self.end


def summary(simulation: Simulation, served: Sequence[Served], phase: Phase | None = None) -> Run:
    """Figures of a run; raises ValueError if no request of the phase was answered."""
    phase = phase or Phase()
    served = [one for one in served if phase.has(one.traced)]
    failed = [one for one in simulation.failed if phase.has(one.traced)]
    if not served:
        raise ValueError(f"{simulation.policy}: no request of that time was answered")
    ttft = np.array([request.ttft for request in served])
    e2e = np.array([request.completion for request in served])
    predicted_ttft = np.array([request.decision.predicted_ttft for request in served])
    predicted = np.array([request.decision.predicted_completion for request in served])
    stays = ((one.replica, one.traced.at, one.traced.at + one.completion) for one in served)
    every = _work(served, failed)
    return {
        "policy": simulation.policy,
        "phase_s": [phase.start, None if phase.end == inf else phase.end],
        "requests": len(served),
        "failed": len(failed),
        "ttft_s": distribution(ttft),
        "e2e_s": distribution(e2e),
        "hits": every["cached_tokens"] / every["prompt_tokens"],
        "imbalance": imbalance(stays, simulation.fleet_file.speeds),
        "preemptions": every["preemptions"],
        "prediction": {
            "ttft_mape": float(np.median(np.abs(predicted_ttft - ttft) / ttft)),
            "e2e_mape": float(np.median(np.abs(predicted - e2e) / e2e)),
            "rank_corr": rank_correlation(predicted, e2e),
        },
        "groups": _groups(served),
        "learned_speed": [asdict(one) for one in simulation.speeds.learned],
        "per_replica": {
            name: _work(
                [one for one in served if one.replica == name],
                [one for one in failed if one.replica == name],
            )
            for name in simulation.machines
        },
    }


def requests_of(
    simulation: Simulation, served: Iterable[Served], phase: Phase
) -> list[dict[str, Any]]:
    """Requests for the JSON; those outside the phase are load, and not counted."""
    requests = [(one.traced, _served(one, simulation.policy)) for one in served]
    for one in simulation.failed:
        failure = {"error": "failed", "failed_after_s": one.at - one.traced.at}
        end = {"at_s": one.traced.at, **failure, "replica": one.replica or None}
        requests.append((one.traced, end))
    return [one | {"counted": phase.has(traced)} for traced, one in requests]


def header() -> str:
    names = "".join(f"{name:>8}" for name in FIGURES)
    return (
        f"{'':18}{'TTFT s':^32}   {'completion s':^32}   error  × the oracle's"
        f"   prefix\n"
        f"{'policy':18}{names}   {names}           mean    p99     hits  imbalance  failed    took"
    )


def row(run: Run, took: float) -> str:
    """Line of a run, and lines for its groups and the changes of speed it had to learn."""
    name = f"oracle (cost ×{run['weight']:g})" if "weight" in run else run["policy"]
    gap = run.get("to_oracle")
    distance = f"{gap['e2e_s']['mean']:7.2f}{gap['e2e_s']['p99']:7.2f}" if gap else " " * 14
    line = (
        f"{name:18}{_times(run)}  {run['prediction']['e2e_mape']:6.0%} {distance}"
        f"{run['hits']:9.0%}{run['imbalance']:11.2f}{run['failed']:8}{took:7.1f}s"
    )
    for group, one in run["groups"].items():
        line += f"\n  {group:16}{_times(one)}  {one['in_time']:6.1%} in time"
    for one in run["learned_speed"]:
        line += (
            f"\n  {one['replica']} at {one['at']:.0f} s, now {one['slow']:g}× as slow as its "
            f"profile: its steps are believed to take {one['ratio']:.2f}× the truth"
        )
    return line


def _times(of: Run) -> str:
    return "   ".join("".join(f"{of[part][one]:8.3f}" for one in FIGURES) for part in PARTS)


def _groups(served: Iterable[Served]) -> dict[str, dict[str, Any]]:
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    met: Counter[str] = Counter()
    for one in served:
        times[one.group].append((one.ttft, one.completion))
        met[one.group] += one.in_time
    if len(times) < 2 and "target" not in times:
        return {}
    return {
        group or "others": {
            "requests": len(pairs),
            "in_time": met[group] / len(pairs),
            **dict(zip(PARTS, map(distribution, np.transpose(pairs)), strict=True)),
        }
        for group, pairs in sorted(times.items())
    }


def _served(one: Served, policy: str) -> dict[str, Any]:
    """Record of a request; predictions of the oracle are none that a router could make."""
    predicted = None if policy == "oracle" else one.decision
    return {
        "at_s": one.traced.at,
        "prompt_tokens": one.traced.prompt_tokens,
        "output_tokens": one.traced.output_tokens,
        "group": one.group,
        "stream": one.profile.stream,
        "ttft_s": one.ttft,
        "completion_s": one.completion,
        "replica": one.replica,
        "predicted_ttft_s": predicted and predicted.predicted_ttft,
        "predicted_completion_s": predicted and predicted.predicted_completion,
    }


def _work(served: Sequence[Served], failed: Sequence[Failed]) -> dict[str, int]:
    return {
        "requests": len(served),
        "failed": len(failed),
        "prompt_tokens": sum(one.traced.prompt_tokens for one in served),
        "cached_tokens": sum(one.sequence.cached_tokens for one in served),
        "generated_tokens": sum(one.traced.output_tokens for one in served),
        "preemptions": sum(one.sequence.preemptions for one in served),
    }
