"""Plays traces against simulated replicas under a virtual clock, one policy after another.

    python -m benchmarks.simulate --trace benchmarks/traces/azure-2023-conv.jsonl.gz \\
        --fleet benchmarks/fleets/mixed.yaml --policy completion,lmetric --speed 4

The first run uses an oracle, which knows the exact state of every engine and the length of every
answer. Policies are compared with the oracle.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from benchmarks import arguments, fleet, trace
from benchmarks.arguments import about
from benchmarks.discrete import KNOWN, FleetSimulation
from benchmarks.oracle import WEIGHTS
from benchmarks.summary import TIMES, CountedPhase, Run, header, requests_of, row, summary
from extproc.cli.arguments import above_zero, number, probability
from extproc.lab.replay.figures import FIGURES, progress
from extproc.lab.replay.routers import Served
from extproc.request.objective import Objective
from extproc.route.policies import POLICIES


@dataclass(frozen=True, slots=True)
class _Played:
    simulation: FleetSimulation
    served: list[Served]
    run: Run
    took: float  # seconds of CPU


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    phase = CountedPhase(args.start, args.end)
    try:
        arguments.check_outputs(args)
        fleet_file = fleet.read(args.fleet)
        requests = trace.read(args.trace, args.speed, args.requests, args.skip, args.duration)
        played = _compare(args, fleet_file, requests, phase)
        arguments.keep(args, _results(args, argv, fleet_file, played, phase))
    except (OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(
    args: argparse.Namespace,
    fleet_file: fleet.FleetFile,
    requests: list[trace.TracedRequest],
    phase: CountedPhase,
) -> list[_Played]:
    if phase != CountedPhase():
        print(phase)
    print(header())
    with_oracle = args.oracle and not args.adapters  # the oracle knows no adapters
    oracle = _best_oracle(fleet_file, args.seed, requests, phase) if with_oracle else None
    if oracle:
        print(row(oracle.run, oracle.took), flush=True)
    options = {
        "know": frozenset(args.know),
        "profile_error": args.profile_error,
        "routers": args.routers,
        "share_lag": args.share_lag,
        "hold": args.hold == "on",
        "urgent": args.urgent,
        "tenants": args.tenants,
        "adapters": args.adapters,
        "target": Objective("target", ttft_s=args.ttft_target, completion_s=args.completion_target),
        "target_share": args.target_share,
        "ignore_targets": args.ignore_targets,
    }
    played = []
    for policy in args.policy:
        simulation = FleetSimulation(fleet_file, policy, args.poll_interval, args.seed, **options)
        played.append(_play(simulation, requests, phase))
        run = played[-1].run
        if oracle:
            run["to_oracle"] = {
                times: {name: run[times][name] / oracle.run[times][name] for name in FIGURES}
                for times in TIMES
                if run[times] and oracle.run[times]
            }
        print(row(run, played[-1].took), flush=True)
    return [*played, oracle] if oracle else played


def _best_oracle(
    fleet_file: fleet.FleetFile, seed: int, requests: list[trace.TracedRequest], phase: CountedPhase
) -> _Played:
    """Runs the oracle with several weights of the cost to others; returns the run with the best
    mean completion."""
    tried = []
    for weight in WEIGHTS:
        simulation = FleetSimulation(fleet_file, "oracle", seed=seed, weight=weight)
        tried.append(_play(simulation, requests, phase))
        tried[-1].run["weight"] = weight
    return min(tried, key=lambda played: played.run["e2e_s"]["mean"])


def _play(
    simulation: FleetSimulation, requests: Sequence[trace.TracedRequest], phase: CountedPhase
) -> _Played:
    started = time.process_time()
    served: list[Served] = []
    show = progress(simulation.policy)
    for request in simulation.run(requests):
        served.append(request)
        show((len(served) + len(simulation.failed)) / len(requests))
    took = time.process_time() - started
    return _Played(simulation, served, summary(simulation, served, phase), took)


def _results(
    args: argparse.Namespace,
    argv: Sequence[str] | None,
    fleet_file: fleet.FleetFile,
    played: Sequence[_Played],
    phase: CountedPhase,
) -> dict[str, Any]:
    setting = {
        "trace": " and ".join(path.name.split(".")[0] for path in args.trace),
        "speed": args.speed,
        "fleet": args.fleet.stem,
        "seed": args.seed,
        "figures": f"of {phase}",
    }
    names = [result.simulation.policy for result in played]
    return {
        "simulate": setting | about("benchmarks.simulate", argv),
        "runs": [
            {
                "run": {"name": name, "reference": name == "oracle"},
                "requests": requests_of(result.simulation, result.served, phase),
                "summary": result.run,
            }
            for name, result in zip(names, played, strict=True)
        ],
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    usage = "%(prog)s --trace FILE[,FILE] --fleet FLEET.yaml [options]"
    parser = arguments.command("simulate", __doc__, usage=usage)
    add = parser.add_argument
    add("--trace", type=arguments.paths, required=True, metavar="FILE[,FILE]")
    add("--fleet", type=Path, required=True, metavar="FLEET.yaml")
    add("--policy", type=arguments.some_of(POLICIES), default=["completion"], metavar="a,b,c")
    arguments.add_part(parser, "--skip")
    routers = "number of routers; each request goes to one at random [1]"
    add("--routers", type=arguments.count, default=1, metavar="N", help=routers)
    lag = "seconds until a digest reaches the other routers [digests are lost]"
    add("--share-lag", type=number, metavar="S", help=lag)
    interval = "seconds between two scrapes [0.05 for queue_kv and least_kv, else 0.2]"
    add("--poll-interval", type=above_zero, metavar="S", help=interval)
    hold = "queue requests at the router while no replica can take them [off]"
    add("--hold", choices=("on", "off"), default="off", help=hold)
    urgent = "share of the requests that overtake others in the queue [0]"
    add("--urgent", type=probability, default=0.0, metavar="SHARE", help=urgent)
    ttft = "target for the seconds until the first token [none]"
    add("--ttft-target", type=above_zero, default=inf, metavar="S", help=ttft)
    completion = "target for the seconds until the last token [none]"
    add("--completion-target", type=above_zero, default=inf, metavar="S", help=completion)
    share = "share of the requests that have the targets [1]"
    add("--target-share", type=probability, default=1.0, metavar="SHARE", help=share)
    ignored = "count the requests that meet their targets, but hide the targets from the router"
    add("--ignore-targets", action="store_true", help=ignored)
    tenants = "ratio of the requests of several tenants [a single tenant]"
    add("--tenants", type=arguments.counts, default=[], metavar="N,M", help=tenants)
    adapters = "LoRA adapters; the k-th has 1/k as many requests as the model itself; no oracle [0]"
    add("--adapters", type=arguments.count, default=0, metavar="N", help=adapters)
    known, know = arguments.some_of(KNOWN), "knowledge to give the router beyond production's"
    add("--know", type=known, default=[], metavar=",".join(KNOWN), help=know)
    error = "the router's first profile is X times as slow as the truth"
    add("--profile-error", type=above_zero, default=1.0, metavar="X", help=error)
    start = "count only requests that arrive from this second on"
    add("--from", dest="start", type=number, default=0.0, metavar="S", help=start)
    end = "count only requests that arrive before this second"
    add("--until", dest="end", type=above_zero, default=inf, metavar="S", help=end)
    add("--seed", type=int, default=0)
    add("--no-oracle", dest="oracle", action="store_false", help="skip the oracle: faster")
    arguments.add_outputs(parser)
    args = parser.parse_args(argv)
    if args.end <= args.start:
        parser.error(f"--until {args.end:g} is not after --from {args.start:g}")
    return args


if __name__ == "__main__":
    sys.exit(main())
