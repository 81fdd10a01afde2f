"""Plays traces against simulated replicas under a virtual clock, one policy after another.

    python -m benchmarks.simulate --trace benchmarks/traces/azure-2023-conv.jsonl.gz \\
        --fleet benchmarks/fleets/mixed.yaml --policy completion,lmetric --speed 4
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import fleet, trace
from benchmarks.discrete import KNOWN, Served, Simulation
from extproc.route.policies import POLICIES


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        requests = trace.read(args.trace, args.speed, args.requests)
        fleet_file = fleet.read(args.fleet)
    except (OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    runs = []
    for policy in args.policy:
        simulation = Simulation(
            fleet_file, policy, args.poll_interval, args.seed, frozenset(args.know)
        )
        started = time.perf_counter()
        served = _play(simulation, requests, policy)
        runs.append(summary(simulation, served))
        _print(runs[-1], time.perf_counter() - started, first=len(runs) == 1)
    if args.json:
        args.json.write_text(json.dumps({"runs": runs}, indent=2) + "\n")
    return 0


def summary(simulation: Simulation, served: Sequence[Served]) -> dict[str, Any]:
    """One run in figures; times in seconds."""
    ttft = np.array([request.ttft for request in served])
    e2e = np.array([request.completion for request in served])
    predicted_ttft = np.array([request.decision.predicted_ttft for request in served])
    predicted = np.array([request.decision.predicted_completion for request in served])
    return {
        "policy": simulation.policy,
        "requests": len(served),
        "ttft_s": _distribution(ttft),
        "e2e_s": _distribution(e2e),
        "preemptions": sum(e.counters.preemptions for e in simulation.engines.values()),
        "prediction": {
            "ttft_mape": _median_error(predicted_ttft, ttft),
            "e2e_mape": _median_error(predicted, e2e),
            "rank_corr": _rank_correlation(predicted, e2e),
        },
        "per_replica": {
            name: {
                "requests": sum(request.decision.replica == name for request in served),
                "generated_tokens": engine.counters.generated_tokens,
                "prompt_tokens": engine.counters.prompt_tokens,
                "preemptions": engine.counters.preemptions,
            }
            for name, engine in simulation.engines.items()
        },
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trace", type=_paths, required=True, metavar="FILE[,FILE]")
    parser.add_argument("--fleet", type=Path, required=True, metavar="FLEET.yaml")
    parser.add_argument("--policy", type=_policies, default=["completion"], metavar="a,b,c")
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast as the trace")
    parser.add_argument("--poll-interval", type=float, default=0.2, metavar="S")
    parser.add_argument(
        "--know",
        type=_known,
        default=[],
        metavar="lengths,coefficients",
        help="what the router is told that production would not know",
    )
    parser.add_argument("--requests", type=int, metavar="N", help="the first N of the trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def _paths(text: str) -> list[Path]:
    return [Path(part) for part in text.split(",")]


def _policies(text: str) -> list[str]:
    return _among(text, list(POLICIES))


def _known(text: str) -> list[str]:
    return _among(text, list(KNOWN))


def _among(text: str, known: list[str]) -> list[str]:
    for part in text.split(","):
        if part not in known:
            raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(known)}")
    return text.split(",")


def _play(
    simulation: Simulation, requests: Sequence[trace.TracedRequest], label: str
) -> list[Served]:
    served: list[Served] = []
    shown = -1
    for request in simulation.run(requests):
        served.append(request)
        percent = 100 * len(served) // len(requests)
        if percent > shown and sys.stderr.isatty():
            shown = percent
            print(f"\r{label} {percent}%", end="", file=sys.stderr, flush=True)
    if shown >= 0:
        print("\r\033[K", end="", file=sys.stderr)
    return served


def _print(run: dict[str, Any], took: float, first: bool) -> None:
    if first:
        header = f"{'mean':>8}{'p50':>8}{'p95':>8}{'p99':>8}"
        print(f"{'':16}{'TTFT s':^32}   {'completion s':^32}   error  took")
        print(f"{'policy':16}{header}   {header}")
    figures = "   ".join(
        "".join(f"{run[part][name]:8.3f}" for name in ("mean", "p50", "p95", "p99"))
        for part in ("ttft_s", "e2e_s")
    )
    print(
        f"{run['policy']:16}{figures}  {run['prediction']['e2e_mape']:5.0%}  {took:4.1f}s",
        flush=True,
    )


def _distribution(seconds: np.ndarray) -> dict[str, float]:
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]).tolist()
    return {"mean": float(seconds.mean()), "p50": p50, "p95": p95, "p99": p99}


def _median_error(predicted: np.ndarray, actual: np.ndarray) -> float:
    return float(np.median(np.abs(predicted - actual) / actual))


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's."""
    ranks = np.stack([values.argsort().argsort() for values in (a, b)]).astype(np.float64)
    ranks -= ranks.mean()
    return float((ranks[0] * ranks[1]).mean() / (ranks[0] ** 2).mean())


if __name__ == "__main__":
    sys.exit(main())
