"""This router beside what people use today: the same trace, one contender after the other.

    python -m benchmarks.compare --fleet benchmarks/fleets/live-mixed.yaml \\
        --trace benchmarks/traces/azure-2023-conv.jsonl.gz --speed 4 --duration 16

Everything is real but the GPUs: Envoy, Redis, router, the peers that `make peers` installed, and
simulated replicas as processes. By default 16 s of arrivals at 4 times the trace's speed, from its
third minute on. Each contender begins with fresh replicas, and a router with the hardware profiles
of the fleet file (``believed``, right or wrong) and nothing else. The exit status is 0 when every
contender did its own policy and answered every request, 1 when one did not, 2 when the comparison
could not be made.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import arguments, fleet
from benchmarks.arguments import about
from benchmarks.compare import pickers
from benchmarks.compare.contenders import Contender, Fleet
from benchmarks.compare.envoy import POLICIES as ENVOY_POLICIES
from benchmarks.compare.envoy import EnvoyAlone, Router
from benchmarks.compare.peers import PRODUCTS, Peer
from benchmarks.compare.pickers import Picker
from benchmarks.compare.play import FAULTS, Fault, play
from benchmarks.compare.products import AIBrix, LlmD
from benchmarks.report import figures
from benchmarks.report.words import progress_header, progress_line, terminal_result
from extproc.cli.arguments import number, probability
from extproc.lab.harness.processes import ProcessError
from extproc.route.policies import POLICIES

_PICKERS = {one.name: one for one in (LlmD(), AIBrix())}
_HERE = Path(__file__).parents[1]
_SPEED = 4.0
_FROM_S = 120.0  # of trace time: until then the Azure conversation trace speeds up
_DURATION_S, _REPEATS = 16.0, 2
_QUICK_DURATION_S = 6.0
_INTERRUPTED = 130  # 128 + SIGINT, as shells count


@dataclass(slots=True)
class _Turns:
    without_part: list[str] = field(default_factory=list)  # contenders that the fault spares
    runs: list[dict[str, Any]] = field(default_factory=list)
    not_run: list[dict[str, Any]] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    logs = Path(tempfile.mkdtemp(prefix="extproc-compare-"))
    turns = _Turns()
    origin = about("benchmarks.compare", sys.argv[1:] if argv is None else argv)
    try:
        file = fleet.read(args.fleet)
        contenders, turns.without_part = _with_part(args.fault, _contenders(args, file))
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.check_outputs(args)
        asyncio.run(_compare(args, contenders, Fleet(file), turns, logs))
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
    replicas: Fleet,
    turns: _Turns,
    logs: Path,
) -> None:
    """Runs all contenders before the next repeat: changes on the machine meet all of them."""
    for one in contenders:
        print(f"{one.name:30}{one.about}")
    print("\n" + progress_header(), flush=True)
    for repeat in range(args.repeats):
        first = repeat % len(contenders)  # no contender is always the first on a machine
        for one in (*contenders[first:], *contenders[:first]):
            directory = logs / f"{repeat}-{one.name.replace(':', '-')}"
            try:
                turns.runs.append(await play(one, replicas, args, repeat, directory))
                print(progress_line(turns.runs[-1]), flush=True)
            except (ProcessError, aiohttp.ClientError, OSError, ValueError) as error:
                turns.not_run.append({"name": one.name, "repeat": repeat, "why": str(error)})
                print(f"{repeat + 1} {one.name}\n  wrong: not run: {error}", flush=True)


def contender(name: str, programs: Path | None = None, fair: bool = False) -> Contender:
    """Contender of a name, ``kind:policy``; a kind alone stands for its usual policy.

    ``fair`` puts pickers of the standard protocol behind this project's Envoy file. ValueError if
    it is unknown or not installed, neither in ``programs`` nor on ``PATH``.
    """
    kind, _, policy = name.partition(":")
    if kind == "router":
        return Router(_among(kind, policy or "completion", tuple(POLICIES)))
    if kind == "envoy":
        return EnvoyAlone(_among(kind, policy or "least_request", ENVOY_POLICIES))
    if kind in _PICKERS:
        picker = _PICKERS[kind]
        program = pickers.found(picker, programs)
        if program is None:
            raise ValueError(
                f"{kind} needs the program {picker.program}: see docs/compare-build.md"
            )
        policy = _among(kind, policy or picker.policies[0], picker.policies)
        return Picker(picker, policy, program, fair and picker.standard)
    if kind not in PRODUCTS:
        kinds = ", ".join(("router", "envoy", *PRODUCTS, *_PICKERS))
        raise ValueError(f"there is no contender {kind!r}; there are: {kinds}")
    product = PRODUCTS[kind]
    if not product.installed:
        raise ValueError(f"{kind} is not installed: run make peers ({product.command} is missing)")
    return Peer(product, _among(kind, policy or product.best, product.policies))


def _with_part(
    fault: Fault | None, every: Sequence[Contender]
) -> tuple[list[Contender], list[str]]:
    """Contenders that have the part a fault falls on, and the names of the others."""
    if fault is None or fault.part == "replica":
        return [*every], []
    having = [one for one in every if fault.part in one.parts]
    if not having:
        raise ValueError(f"{fault.name}: no contender here has a {fault.part} of its own")
    return having, [one.name for one in every if one not in having]


def _among(kind: str, policy: str, known: Sequence[str]) -> str:
    if policy not in known:
        raise ValueError(f"{kind} has no policy {policy!r}; it has: {', '.join(known)}")
    return policy


def _contenders(args: argparse.Namespace, file: fleet.FleetFile) -> list[Contender]:
    """Contenders of ``--contenders``, or this router, Envoy alone and the installed peers."""
    unequal = len({*file.members.values()}) > 1
    names = args.contenders or [
        "router:completion",
        "envoy:round_robin",
        "envoy:least_request",
        *(["envoy:least_request_weighted"] if unequal else []),
        *(
            f"{one.name}:{one.best}"
            for one in PRODUCTS.values()
            if one.installed and not args.quick
        ),
    ]
    return [_named(args, name) for name in names]


def _named(args: argparse.Namespace, name: str) -> Contender:
    return contender(name, args.programs, args.envoy == "fair")


def _result(args: argparse.Namespace, origin: dict[str, Any], turns: _Turns) -> dict[str, Any]:
    ran = list(dict.fromkeys(run["run"]["name"] for run in turns.runs))
    kinds = {name.partition(":")[0] for name in ran}
    peers = {one.name: one.version for one in PRODUCTS.values() if one.name in kinds}
    result = {
        "compare": {
            **origin,
            "versions": {**origin["versions"], **peers},
            "fleet": str(args.fleet),
            "trace": ",".join(map(str, args.trace)),
            "speed": args.speed,
            "from_s": args.skip,
            "duration_s": args.duration,
            "stream_share": args.stream_share,
            "seed": args.seed,
            "repeats": args.repeats,
            "fault": asdict(args.fault) if args.fault else None,
            "without_part": turns.without_part,
            "ours": [name for name in ran if name.startswith("router:")],
            "contenders": {name: _named(args, name).about for name in ran},
        },
        "not_run": turns.not_run,
        "runs": turns.runs,
    }
    return result | {"figures": figures.to_json(result)}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.command("compare", __doc__)
    add = parser.add_argument
    add("--fleet", type=Path, default=_HERE / "fleets" / "live-mixed.yaml", metavar="FLEET.yaml")
    trace = [_HERE / "traces" / "azure-2023-conv.jsonl.gz"]
    add("--trace", type=arguments.paths, default=trace, metavar="FILE[,FILE]")
    arguments.add_part(parser, "--from", requests=False)
    parser.set_defaults(speed=_SPEED, skip=None, duration=None)
    turns = "turns of each contender, each with the next part of the trace [2]"
    add("--repeats", type=arguments.count, metavar="N", help=turns)
    names, split = "kind:policy, see benchmarks/README.md", lambda text: text.split(",")
    add("--contenders", type=split, metavar="a,b,c", help=names)
    programs = "where epp (llm-d) and gateway-plugins (AIBrix) are [PATH]"
    add("--programs", type=Path, metavar="DIR", help=programs)
    behind = "fair: llm-d behind this project's envoy/endpoint_picker.yaml [its makers' file]"
    add("--envoy", choices=("own", "fair"), default="own", help=behind)
    add("--stream-share", type=probability, default=0.5, metavar="F", help="[0.5]")
    add("--seed", type=int, default=0)
    fault = f"what happens in each turn: {', '.join(FAULTS)}"
    add("--fault", choices=FAULTS, metavar="PART-WAY", help=fault)
    add("--at", type=number, metavar="S", help="when it does [half of --duration]")
    add("--quick", action="store_true", help="two minutes: without peers, once, for 6 s")
    arguments.add_outputs(parser)
    args = parser.parse_args(argv)
    args.skip = _FROM_S / args.speed if args.skip is None else args.skip
    args.duration = args.duration or (_QUICK_DURATION_S if args.quick else _DURATION_S)
    args.repeats = args.repeats or (1 if args.quick else _REPEATS)
    if args.at is not None and not (args.fault and args.at < args.duration):
        parser.error("--at is when the --fault happens: some time before --duration has passed")
    try:
        args.contenders = list(dict.fromkeys(_named(args, n).name for n in args.contenders or ()))
    except ValueError as error:
        parser.error(f"--contenders: {error}")
    at_s = args.duration / 2 if args.at is None else args.at
    args.fault = Fault(args.fault, at_s) if args.fault else None
    return args


if __name__ == "__main__":
    sys.exit(main())
