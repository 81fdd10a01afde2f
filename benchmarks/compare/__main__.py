"""Compares this router with what people use today: each contender serves the same trace in turn.

    python -m benchmarks.compare --fleet benchmarks/fleets/live-mixed.yaml \\
        --trace benchmarks/traces/azure-2023-conv.jsonl.gz --speed 4 --duration 16

Everything except the GPUs is real: Envoy, Redis, router, the peers that `make peers` installed, and
a process for each simulated replica. With `--servers`, running vLLM servers take the place of the
simulated replicas. By default a run is 16 s of arrivals at 4 times the trace's speed, from
the third minute of the trace on. Each run begins with fresh replicas. A router starts with the
hardware profiles of the fleet file (``believed``, right or wrong) and nothing else. The exit status
is 0 when every contender applied its own policy and answered every request, 1 when a run went
wrong, 2 when the comparison could not be made.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import arguments, fleet
from benchmarks.arguments import about
from benchmarks.compare import pickers
from benchmarks.compare.contenders import ComparedFleet, Contender, RunningServers, SimulatedFleet
from benchmarks.compare.envoy import OBSERVED, EnvoyContender, ObservedContender, RouterContender
from benchmarks.compare.envoy import POLICIES as ENVOY_POLICIES
from benchmarks.compare.peers import PROXIES, ProxyContender
from benchmarks.compare.pickers import PickerContender
from benchmarks.compare.play import FAULTS, REPLICA_FAULTS, play
from benchmarks.compare.products import AIBrix, LlmD
from benchmarks.report import figures
from benchmarks.report.results import Fault
from benchmarks.report.words import progress_header, progress_line, terminal_result
from extproc.cli.arguments import above_zero, number, probability
from extproc.lab.harness.processes import ProcessError
from extproc.predict.step import DEFAULT_PROFILE, PROFILES
from extproc.route.policies import POLICIES

_PICKERS = {product.name: product for product in (LlmD(), AIBrix())}
_HERE = Path(__file__).parents[1]
_SPEED = 4.0
_FROM_S = 120.0  # of trace time: the rate of the Azure conversation trace rises until then
_DURATION_S, _REPEATS = 16.0, 2
_QUICK_DURATION_S = 6.0
_BUILD = "benchmarks/README.md#other-endpoint-pickers"
_INTERRUPTED = 130  # 128 + SIGINT, as shells count


@dataclass(slots=True)
class _Turns:
    without_part: list[str] = field(default_factory=list)  # contenders without the part that fails
    runs: list[dict[str, Any]] = field(default_factory=list)
    not_run: list[dict[str, Any]] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    logs = Path(tempfile.mkdtemp(prefix="extproc-compare-"))
    turns = _Turns()
    origin = about("benchmarks.compare", argv)
    try:
        replicas = _replicas(args)
        contenders, turns.without_part = _with_part(args.fault, _contenders(args, replicas))
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.check_outputs(args)
        asyncio.run(_compare(args, contenders, replicas, turns, logs))
        status = int(bool(turns.not_run) or any(run["complaints"] for run in turns.runs))
    except (ProcessError, OSError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("\ncompare: interrupted", file=sys.stderr)
        status = _INTERRUPTED
    if turns.runs:
        result = _result(args, origin, turns)
        print("\n" + terminal_result(result))
        arguments.keep(args, result)
    if status:
        print(f"logs: {logs}", file=sys.stderr)
    else:
        shutil.rmtree(logs, ignore_errors=True)
    return status if turns.runs else max(status, 2)


async def _compare(
    args: argparse.Namespace,
    contenders: Sequence[Contender],
    replicas: ComparedFleet,
    turns: _Turns,
    logs: Path,
) -> None:
    """Runs all contenders before the next repeat, so that changes on the machine affect all of
    them."""
    for contender in contenders:
        print(f"{contender.name:30}{contender.about}")
    print("\n" + progress_header(), flush=True)
    for repeat in range(args.repeats):
        first = repeat % len(contenders)  # no contender is always the first on a machine
        for contender in (*contenders[first:], *contenders[:first]):
            name = contender.name
            directory = logs / f"{repeat}-{name.replace(':', '-')}"
            try:
                turns.runs.append(await play(contender, replicas, args, repeat, directory))
                print(progress_line(turns.runs[-1]), flush=True)
            except (ProcessError, aiohttp.ClientError, OSError, ValueError) as error:
                turns.not_run.append({"name": name, "repeat": repeat, "why": str(error)})
                print(f"{repeat + 1} {name}\n  wrong: not run: {error}", flush=True)


def contender_named(name: str, programs: Path | None = None) -> Contender:
    """Contender with the name ``kind:policy``; a kind alone means its usual policy.

    Raises ValueError if the contender is unknown or its program is neither in ``programs`` nor on
    ``PATH``.
    """
    kind, _, policy = name.partition(":")
    if kind == "router":
        return RouterContender(_checked(kind, policy or "completion", tuple(POLICIES)))
    if kind == "envoy":
        return EnvoyContender(_checked(kind, policy or "least_request", ENVOY_POLICIES))
    if kind == "observed":
        return ObservedContender(_checked(kind, policy or "least_request", OBSERVED))
    if kind in _PICKERS:
        picker = _PICKERS[kind]
        program = pickers.find_program(picker, programs)
        if program is None:
            raise ValueError(f"{kind} needs the program {picker.program}: see {_BUILD}")
        policy = _checked(kind, policy or picker.policies[0], picker.policies)
        return PickerContender(picker, policy, program)
    if kind not in PROXIES:
        kinds = ", ".join(("router", "envoy", "observed", *PROXIES, *_PICKERS))
        raise ValueError(f"no contender is called {kind!r}; known: {kinds}")
    proxy = PROXIES[kind]
    if not proxy.installed:
        raise ValueError(f"{kind} is not installed: run make peers ({proxy.command} is missing)")
    return ProxyContender(proxy, _checked(kind, policy or proxy.best, proxy.policies))


def _with_part(
    fault: Fault | None, every: Sequence[Contender]
) -> tuple[list[Contender], list[str]]:
    """Contenders that have the part which fails, and the names of the other contenders."""
    if fault is None or fault.part == "replica":
        return [*every], []
    having = [contender for contender in every if fault.part in contender.parts]
    if not having:
        raise ValueError(f"{fault.name}: no contender in this comparison has a {fault.part}")
    return having, [contender.name for contender in every if contender not in having]


def _checked(kind: str, policy: str, known: Sequence[str]) -> str:
    if policy not in known:
        raise ValueError(f"{kind} has no policy {policy!r}; known: {', '.join(known)}")
    return policy


def _replicas(args: argparse.Namespace) -> ComparedFleet:
    if args.servers:
        return RunningServers(args.servers, args.model, args.profile, args.speeds)
    return SimulatedFleet(fleet.read(args.fleet))


def _contenders(args: argparse.Namespace, replicas: ComparedFleet) -> list[Contender]:
    """Contenders of ``--contenders``, or this router, Envoy alone and the installed peers."""
    names = args.contenders
    if not names:
        names = ["router:completion", "envoy:round_robin", "envoy:least_request"]
        if len({*replicas.speeds.values()}) > 1:
            names.append("envoy:least_request_weighted")
        if not args.quick:
            installed = [proxy for proxy in PROXIES.values() if proxy.installed]
            names += [f"{proxy.name}:{proxy.best}" for proxy in installed]
    return [contender_named(name, args.programs) for name in names]


def _result(args: argparse.Namespace, origin: dict[str, Any], turns: _Turns) -> dict[str, Any]:
    ran = list(dict.fromkeys(run["run"]["name"] for run in turns.runs))
    kinds = {name.partition(":")[0] for name in ran}
    peers = {name: proxy.version for name, proxy in PROXIES.items() if name in kinds}
    result = {
        "compare": {
            **origin,
            "versions": {**origin["versions"], **peers},
            "fleet": ", ".join(args.servers) or str(args.fleet),
            "trace": ",".join(map(str, args.trace)),
            "speed": args.speed,
            "from_s": args.skip,
            "duration_s": args.duration,
            "stream_share": args.stream_share,
            "seed": args.seed,
            "repeats": args.repeats,
            "fault": args.fault.model_dump() if args.fault else None,
            "without_part": turns.without_part,
            "ours": [name for name in ran if name.startswith("router:")],
            "contenders": {name: contender_named(name, args.programs).about for name in ran},
        },
        "not_run": turns.not_run,
        "runs": turns.runs,
    }
    return result | {"figures": figures.to_json(result)}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.command("compare", __doc__)
    add = parser.add_argument
    add("--fleet", type=Path, metavar="FLEET.yaml", help="simulated replicas [live-mixed.yaml]")
    servers = "running vLLM servers instead of a fleet, in development mode"
    add("--servers", type=arguments.address, nargs="+", default=[], metavar="IP:PORT", help=servers)
    add("--model", help=f"name of the model on the servers [{arguments.MODEL}]")
    profile = f"hardware profile that the router is given for each server [{DEFAULT_PROFILE}]"
    add("--profile", choices=PROFILES, metavar="NAME", help=profile)
    speeds = "true speeds of the servers in any unit, for envoy:least_request_weighted"
    add("--speeds", type=above_zero, nargs="+", default=[], metavar="X", help=speeds)
    trace = [_HERE / "traces" / "azure-2023-conv.jsonl.gz"]
    add("--trace", type=arguments.paths, default=trace, metavar="FILE[,FILE]")
    arguments.add_part(parser, "--from", requests=False)
    parser.set_defaults(speed=_SPEED, skip=None, duration=None)
    turns = "runs of each contender, each with the next part of the trace [2]"
    add("--repeats", type=arguments.count, metavar="N", help=turns)
    names, split = "kind:policy, see benchmarks/README.md", lambda text: text.split(",")
    add("--contenders", type=split, metavar="a,b,c", help=names)
    arguments.add_programs(parser)
    add("--stream-share", type=probability, default=0.5, metavar="F", help="[0.5]")
    add("--seed", type=int, default=0)
    fault = f"part that fails in each run, and how: {', '.join(FAULTS)}"
    add("--fault", choices=FAULTS, metavar="PART-WAY", help=fault)
    add("--at", type=number, metavar="S", help="time of the fault [half of --duration]")
    add("--quick", action="store_true", help="two minutes: without peers, a single run of 6 s")
    arguments.add_outputs(parser)
    args = parser.parse_args(argv)
    args.skip = _FROM_S / args.speed if args.skip is None else args.skip
    args.duration = args.duration or (_QUICK_DURATION_S if args.quick else _DURATION_S)
    args.repeats = args.repeats or (1 if args.quick else _REPEATS)
    if args.servers and args.fleet:
        parser.error("give either --servers or --fleet")
    if args.speeds and len(args.speeds) != len(args.servers):
        parser.error("--speeds needs a speed for each server of --servers")
    if (args.model or args.profile) and not args.servers:
        parser.error("--model and --profile describe running servers: give --servers, too")
    if args.servers and args.fault in REPLICA_FAULTS:
        parser.error("--fault: servers that run already cannot fail")
    args.model, args.profile = args.model or arguments.MODEL, args.profile or DEFAULT_PROFILE
    args.fleet = args.fleet or _HERE / "fleets" / "live-mixed.yaml"
    if args.at is not None and not (args.fault and args.at < args.duration):
        parser.error("--at needs --fault, and must be less than --duration")
    try:
        named = [contender_named(name, args.programs).name for name in args.contenders or ()]
    except ValueError as error:
        parser.error(f"--contenders: {error}")
    args.contenders = list(dict.fromkeys(named))
    if args.servers and not args.speeds and "envoy:least_request_weighted" in args.contenders:
        parser.error("envoy:least_request_weighted needs the speeds of the servers: --speeds")
    at_s = args.duration / 2 if args.at is None else args.at
    args.fault = Fault(name=args.fault, at_s=at_s) if args.fault else None
    return args


if __name__ == "__main__":
    sys.exit(main())
