"""Compares the simulator with a real vLLM server, request by request.

Compares a recording, the one that comes with this repository or another:

    python -m benchmarks.fit [--recording FILE]

Or makes one first, on two CPU cores (needs `vllm`, with its CPU backend, on PATH; Linux):

    python -m benchmarks.fit --serve MODEL_DIR --recording FILE

The server's speed is measured on requests that are not compared, or learned from the counters
polled during a run, as a router learns it.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments
from benchmarks.fit.record import Plan, record
from benchmarks.fit.replay import Fitted, Recording, fit, read_recording, write_recording
from benchmarks.vllm import described
from extproc.cli.arguments import above_zero
from extproc.ground.text import Column, table
from extproc.lab.harness.processes import ProcessError
from extproc.lab.replay.figures import FIGURES
from extproc.poll.scrape import ScrapeError

_HERE = Path(__file__).parents[1]
RECORDED = _HERE / "recordings" / "vllm-cpu-29m.json.gz"
_TRACE = _HERE / "traces" / "azure-2023-conv.jsonl.gz"


def _print(recorded: Recording, fitted: list[Fitted]) -> None:
    print("; ".join(recorded.about.values()))
    first = [Column("step times", left=True), Column("simulated ÷ real, s", left=True)]
    head = [*first, *map(Column, FIGURES), Column("requests")]
    for one in fitted:
        print(f"\n{one.run.name}, {len(one.run.requests)} requests")
        compared = [
            [name, kind, *_cells(comparison)]
            for name, simulated in one.simulated.items()
            for kind, comparison in simulated.comparisons.items()
        ]
        print(*table(head, compared), sep="\n")
        for name, simulated in one.simulated.items():
            print(f"{name}: {described(simulated.step)}", flush=True)


def _cells(one: Mapping[str, Any]) -> Iterator[str]:
    for name in FIGURES:
        quotient = f"{one['simulated'][name]:.2f} ÷ {one['real'][name]:.2f}"
        yield f"{quotient} {one['errors'][name]:+4.0%}"
    yield f"{one['request_error']:.0%}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.command("fit", __doc__)
    parser.add_argument("--recording", type=Path, default=RECORDED, metavar="FILE")
    arguments.add_json(parser)
    add = parser.add_argument_group("making a recording").add_argument
    add("--serve", type=Path, metavar="MODEL_DIR", help="model to run vLLM with")
    add("--max-num-seqs", type=arguments.count, default=16, metavar="N")
    add("--trace", type=Path, default=_TRACE, metavar="FILE")
    add("--requests", type=arguments.count, default=300, metavar="N", help="of each run [300]")
    speeds, runs = [0.325, 0.4, 0.526], "of the trace, a run each [0.325 0.4 0.526]"
    add("--speed", type=above_zero, nargs="+", default=speeds, metavar="X", help=runs)
    by, names = "divide the trace's prompts and answers [6 3]", ("P", "A")
    add("--shrink", type=arguments.count, nargs=2, default=[6, 3], metavar=names, help=by)
    args = parser.parse_args(argv)
    if args.serve and args.recording == RECORDED:
        parser.error("--serve needs --recording: where to keep what is recorded")
    return args


def _record(args: argparse.Namespace) -> None:
    plan = Plan(args.trace, args.requests, args.speed, *args.shrink)
    with tempfile.TemporaryDirectory(prefix="extproc-fit-") as logs:
        made = asyncio.run(record(args.serve, args.max_num_seqs, plan, Path(logs)))
    write_recording(made, args.recording)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        arguments.check_outputs(args)
        if args.serve:
            args.recording.open("a").close()
            _record(args)
        recorded = read_recording(args.recording)
    except (ProcessError, ScrapeError, RuntimeError, OSError, ValueError) as error:
        print(f"fit: {error}", file=sys.stderr)
        return 1
    fitted = fit(recorded)
    _print(recorded, fitted)
    runs = [one.to_json() for one in fitted]
    arguments.keep(args, {"about": recorded.about, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
