"""Plays traces against simulated replicas under a virtual clock, one policy after another.

    python -m benchmarks.simulate --trace benchmarks/traces/azure-2023-conv.jsonl.gz \\
        --fleet benchmarks/fleets/mixed.yaml --policy completion,lmetric --speed 4

An oracle comes first, which sees the exact state of every engine and every length: policies are
compared with it.
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
from benchmarks.discrete import KNOWN, Simulation
from benchmarks.oracle import WEIGHTS
from benchmarks.summary import PARTS, Phase, Run, header, requests_of, row, summary
from extproc.cli.arguments import above_zero, number, probability
from extproc.lab.replay.figures import FIGURES, progress
from extproc.lab.replay.routers import Served
from extproc.request.objective import Objective
from extproc.route.policies import POLICIES


@dataclass(frozen=True, slots=True)
class _Played:
    simulation: Simulation
    served: list[Served]
    run: Run
    took: float  # seconds of computing


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    phase = Phase(args.start, args.end)
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
    phase: Phase,
) -> list[_Played]:
    if phase != Phase():
        print(phase)
    print(header())
    oracle = _best_oracle(fleet_file, args.seed, requests, phase) if args.oracle else None
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
        simulation = Simulation(fleet_file, policy, args.poll_interval, args.seed, **options)
        one = _play(simulation, requests, phase)
        if oracle:
            one.run["to_oracle"] = {
                part: {name: one.run[part][name] / oracle.run[part][name] for name in FIGURES}
                for part in PARTS
            }
        print(row(one.run, one.took), flush=True)
        played.append(one)
    return [*played, oracle] if oracle else played


def _best_oracle(
    fleet_file: fleet.FleetFile, seed: int, requests: list[trace.TracedRequest], phase: Phase
) -> _Played:
    """Oracle with the weight of the cost to others that has the lowest mean completion."""
    tried = []
    for weight in WEIGHTS:
        simulation = Simulation(fleet_file, "oracle", seed=seed, weight=weight)
        tried.append(_play(simulation, requests, phase))
        tried[-1].run["weight"] = weight
    return min(tried, key=lambda played: played.run["e2e_s"]["mean"])


def _play(simulation: Simulation, requests: Sequence[trace.TracedRequest], phase: Phase) -> _Played:
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
    phase: Phase,
) -> dict[str, Any]:
    setting = {
        "trace": " and ".join(path.name.split(".")[0] for path in args.trace),
        "speed": args.speed,
        "fleet": args.fleet.stem,
        "seed": args.seed,
        "figures": f"of {phase}",
    }
    names = [one.simulation.policy for one in played]
    return {
        "simulate": setting | about("benchmarks.simulate", sys.argv[1:] if argv is None else argv),
        "runs": [
            {
                "run": {"name": name, "reference": name == "oracle"},
                "requests": requests_of(one.simulation, one.served, phase),
                "summary": one.run,
            }
            for name, one in zip(names, played, strict=True)
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
    dealt = "requests are dealt at random"
    add("--routers", type=arguments.count, default=1, metavar="N", help=dealt)
    lag = "seconds that digests take to the other routers (default: they never arrive)"
    add("--share-lag", type=number, metavar="S", help=lag)
    between = "between two scrapes of a replica [0.05 for queue_kv and least_kv, else 0.2]"
    add("--poll-interval", type=above_zero, metavar="S", help=between)
    waits = "whether requests wait at the router while no replica can carry them [off]"
    add("--hold", choices=("on", "off"), default="off", help=waits)
    first = "share of the requests that go first where they wait [0]"
    add("--urgent", type=probability, default=0.0, metavar="SHARE", help=first)
    by = "seconds until the first token that requests aim for [none]"
    add("--ttft-target", type=above_zero, default=inf, metavar="S", help=by)
    until = "and until the last"
    add("--completion-target", type=above_zero, default=inf, metavar="S", help=until)
    aiming = "share of the requests that do [1]"
    add("--target-share", type=probability, default=1.0, metavar="SHARE", help=aiming)
    counted = "count those that meet them, but decide as if nobody aimed for anything"
    add("--ignore-targets", action="store_true", help=counted)
    deal = "so many requests of each tenant for so many of the others [one tenant]"
    add("--tenants", type=arguments.counts, default=[], metavar="N,M", help=deal)
    asked = "LoRA adapters; the k-th is asked for 1/k as often as the model itself [0]"
    add("--adapters", type=arguments.count, default=0, metavar="N", help=asked)
    told = "what the router is told that production would not know"
    known = arguments.some_of(KNOWN)
    add("--know", type=known, default=[], metavar=",".join(KNOWN), help=told)
    wrong = "the profile the router starts from is X times as slow as the truth"
    add("--profile-error", type=above_zero, default=1.0, metavar="X", help=wrong)
    since = "figures are of requests that arrive from this second on"
    add("--from", dest="start", type=number, default=0.0, metavar="S", help=since)
    until = "and before this one"
    add("--until", dest="end", type=above_zero, default=inf, metavar="S", help=until)
    add("--seed", type=int, default=0)
    add("--no-oracle", dest="oracle", action="store_false", help="leave the oracle out: faster")
    arguments.add_outputs(parser)
    args = parser.parse_args(argv)
    if args.end <= args.start:
        parser.error(f"--until {args.end:g} is not after --from {args.start:g}")
    return args


if __name__ == "__main__":
    sys.exit(main())
