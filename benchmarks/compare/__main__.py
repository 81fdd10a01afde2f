"""This router beside what people use today: the same trace, one contender after the other.

    python -m benchmarks.compare --fleet benchmarks/fleets/live-mixed.yaml \\
        --trace benchmarks/traces/azure-2023-conv.jsonl.gz --speed 6 --duration 16

Everything is real but the GPUs: Envoy, Redis, router, the peers that `make peers` installed, and
simulated replicas as processes; or with --vllm real vLLM servers, which it starts on CPU cores.
Each contender begins with fresh replicas, and a router with nothing learned. The exit status is 0
when every contender did its own policy and answered every request, 1 when one did not, 2 when the
comparison could not be made.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks import arguments, fleet, report
from benchmarks.about import about
from benchmarks.compare import envoy, terminal
from benchmarks.compare.contenders import Contender
from benchmarks.compare.fleets import Fleet, RealVllm, Simulated
from benchmarks.compare.peers import PRODUCTS, Peer
from benchmarks.compare.play import Traffic, play
from benchmarks.compare.router import Router
from benchmarks.real_vllm import vllm_servers
from benchmarks.report import figures
from extproc.demo.processes import ProcessError
from extproc.predict.hardware import DEFAULT_PROFILE, PROFILES
from extproc.route.policies import POLICIES

_HERE = Path(__file__).parents[1]
_DURATION_S, _REPEATS = 16.0, 3
_QUICK_DURATION_S = 8.0


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    logs = Path(tempfile.mkdtemp(prefix="extproc-compare-"))
    try:
        _outputs(args)
        origin = about("benchmarks.compare", sys.argv[1:] if argv is None else argv)
        runs = asyncio.run(_compare(args, logs))
    except (ProcessError, OSError, ValueError) as error:
        print(f"compare: {error}\nlogs: {logs}", file=sys.stderr)
        return 2
    result = _result(args, origin, runs)
    print("\n" + terminal.result(result))
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")
    if args.report:
        print(report.write(result, args.report))
    if any(run["complaints"] for run in runs):
        print(f"logs: {logs}", file=sys.stderr)
        return 1
    shutil.rmtree(logs, ignore_errors=True)
    return 0


def _outputs(args: argparse.Namespace) -> None:
    """Raises OSError or ValueError now, not after minutes, where a result could not be written."""
    if args.json:
        args.json.open("a").close()
    if args.report:
        report.writable(args.report)


async def _compare(args: argparse.Namespace, logs: Path) -> list[dict[str, Any]]:
    """Every contender once, then again: what changes on the machine meets all of them."""
    contenders = [contender(name) for name in args.contenders]
    traffic = Traffic(
        tuple(args.trace),
        args.speed,
        args.duration,
        args.stream_share,
        args.seed,
        known_lengths=bool(args.vllm),
    )
    for one in contenders:
        print(f"{one.name:28}{one.about}")
    print("\n" + terminal.progress_header(), flush=True)
    runs = []
    async with _fleet(args, logs) as replicas:
        for repeat in range(args.repeats):
            for one in contenders:
                directory = logs / f"{repeat}-{one.name.replace(':', '-')}"
                runs.append(await play(one, replicas, traffic, repeat, directory))
                print(terminal.progress_line(runs[-1]), flush=True)
    return runs


@asynccontextmanager
async def _fleet(args: argparse.Namespace, logs: Path) -> AsyncIterator[Fleet]:
    if not args.vllm:
        yield Simulated(fleet.read(args.fleet))
        return
    async with vllm_servers(args.vllm, args.max_num_seqs, logs) as servers:
        yield await RealVllm.of(servers, args.profile)


def contender(name: str) -> Contender:
    """The contender of that name, ``kind:policy``; a kind alone stands for its usual policy.

    Raises:
        ValueError: there is none, or it is not installed; the message says what there is.
    """
    kind, _, policy = name.partition(":")
    if kind == "router":
        return Router(_among(kind, policy or "completion", tuple(POLICIES)))
    if kind == "envoy":
        return envoy.EnvoyAlone(_among(kind, policy or "least_request", envoy.POLICIES))
    if kind not in PRODUCTS:
        kinds = ", ".join(("router", "envoy", *PRODUCTS))
        raise ValueError(f"there is no contender {kind!r}; there are: {kinds}")
    product = PRODUCTS[kind]
    if not product.installed:
        raise ValueError(f"{kind} is not installed: run make peers ({product.command} is missing)")
    return Peer(product, _among(kind, policy or product.best, product.policies))


def _among(kind: str, policy: str, known: Sequence[str]) -> str:
    if policy not in known:
        raise ValueError(f"{kind} has no policy {policy!r}; it has: {', '.join(known)}")
    return policy


def _usual(quick: bool) -> list[str]:
    """This router, Envoy without it, and unless it must be quick every peer that is installed."""
    peers = (
        [] if quick else [f"{one.name}:{one.best}" for one in PRODUCTS.values() if one.installed]
    )
    return ["router:completion", "envoy:round_robin", "envoy:least_request", *peers]


def _result(
    args: argparse.Namespace,
    origin: dict[str, Any],
    runs: list[dict[str, Any]],
) -> dict[str, Any]:
    """What --json writes."""
    servers = f"vLLM: {', '.join(map(str, args.vllm))}" if args.vllm else str(args.fleet)
    result = {
        "compare": {
            **origin,
            "fleet": servers,
            "trace": ",".join(map(str, args.trace)),
            "speed": args.speed,
            "duration_s": args.duration,
            "stream_share": args.stream_share,
            "seed": args.seed,
            "repeats": args.repeats,
            "ours": [name for name in args.contenders if name.startswith("router:")],
            "contenders": {name: contender(name).about for name in args.contenders},
        },
        "runs": runs,
    }
    return result | {"figures": figures.to_json(result)}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--fleet", type=Path, default=_HERE / "fleets" / "live-mixed.yaml", metavar="FLEET.yaml")
    add(
        "--trace",
        type=arguments.paths,
        default=[_HERE / "traces" / "azure-2023-conv.jsonl.gz"],
        metavar="FILE[,FILE]",
    )
    add("--speed", type=arguments.positive, default=6.0, metavar="X", help="of the trace [6]")
    add("--duration", type=arguments.positive, metavar="S", help="of the arrivals of a run [16]")
    add("--repeats", type=arguments.count, metavar="N", help="of each contender [3]")
    add("--contenders", type=_names, metavar="a,b,c", help="kind:policy, see benchmarks/README.md")
    add("--stream-share", type=arguments.share, default=0.5, metavar="F", help="[0.5]")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="two minutes: without peers, once, for 8 s")
    add("--vllm", type=arguments.paths, metavar="DIR,DIR", help="models: real servers on CPU cores")
    add("--max-num-seqs", type=_numbers, default=[16, 8], metavar="N,N", help="of the real servers")
    add("--profile", choices=PROFILES, default=DEFAULT_PROFILE, help="told of the real servers")
    add("--json", type=Path, metavar="FILE", help="write all figures and every request")
    add("--report", type=Path, metavar="DIR", help="a page with pictures: needs matplotlib")
    args = parser.parse_args(argv)
    if args.vllm and len(args.vllm) != len(args.max_num_seqs):
        parser.error("--max-num-seqs needs a number for each model of --vllm")
    args.duration = args.duration or (_QUICK_DURATION_S if args.quick else _DURATION_S)
    args.repeats = args.repeats or (1 if args.quick else _REPEATS)
    args.contenders = args.contenders or _usual(args.quick)
    return args


def _names(text: str) -> list[str]:
    try:
        return list(dict.fromkeys(contender(part).name for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
