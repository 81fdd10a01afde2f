"""The simulator against a real vLLM server, request by request.

Compares a recording, the one that comes with this repository or another:

    python -m benchmarks.fit [--recording FILE]

Or makes one first, on two CPU cores (needs `vllm`, with its CPU backend, on PATH; Linux):

    python -m benchmarks.fit --serve MODEL_DIR --recording FILE

How fast the server is was measured on requests that are not compared, or is learned from the
counters polled during a run, as the product learns it.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import arguments
from benchmarks.fit import recording
from benchmarks.fit.compare import Comparison, Figures
from benchmarks.fit.fitted import Fitted, fit
from benchmarks.fit.record import Plan, record
from benchmarks.fit.recording import Recording
from benchmarks.fit.replay import Timing
from extproc.demo.processes import ProcessError
from extproc.poll.scrape import ScrapeError

_HERE = Path(__file__).parents[1]
RECORDED = _HERE / "recordings" / "vllm-cpu-29m.json.gz"
_TRACE = _HERE / "traces" / "azure-2023-conv.jsonl.gz"


def _print(recorded: Recording, fitted: list[Fitted]) -> None:
    print("; ".join(recorded.about.values()))
    for one in fitted:
        print(f"\n{one.run.name}, {len(one.run.requests)} requests")
        print(f"{'simulated ÷ real, seconds':28}" + "".join(f"{f:>18}" for f in Figures.__slots__))
        for name, simulated in one.simulated.items():
            for kind, comparison in simulated.comparisons.items():
                print(f"{name:12}{kind:14}{_row(comparison)}")
        for name, simulated in one.simulated.items():
            print(f"{name}: {_described(simulated.timing)}", flush=True)


def _described(timing: Timing) -> str:
    step = timing.step
    return (
        f"{step.c0 * 1e3:.1f} ms a step, {step.c_prefill * 1e6:.0f} µs a prompt token, "
        f"{step.c_att * 1e6:.2f} µs for each before it, {step.c_batch * 1e6:.0f} µs a sequence, "
        f"{step.c_kv * 1e6:.2f} µs a KV token; {timing.frontend_s * 1e3:.1f} ms before the engine"
    )


def _row(one: Comparison) -> str:
    cells = (
        f"{getattr(one.simulated, name):6.2f} ÷{getattr(one.real, name):6.2f}"
        f"{getattr(one.errors, name):+5.0%}"
        for name in Figures.__slots__
    )
    return " ".join(cells) + f"{one.request_error:6.0%}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--recording", type=Path, default=RECORDED, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    making = parser.add_argument_group("making a recording")
    making.add_argument("--serve", type=Path, metavar="MODEL_DIR", help="model to run vLLM with")
    making.add_argument("--max-num-seqs", type=arguments.count, default=16, metavar="N")
    making.add_argument("--trace", type=Path, default=_TRACE, metavar="FILE")
    making.add_argument(
        "--requests", type=arguments.count, default=300, metavar="N", help="of each run [300]"
    )
    making.add_argument(
        "--speed",
        type=arguments.positive,
        nargs="+",
        default=[0.325, 0.4, 0.526],
        metavar="X",
        help="of the trace, a run each [0.325 0.4 0.526]",
    )
    making.add_argument(
        "--shrink",
        type=arguments.count,
        nargs=2,
        default=[6, 3],
        metavar=("P", "A"),
        help="divide the trace's prompts and answers [6 3]",
    )
    args = parser.parse_args(argv)
    if args.serve and args.recording == RECORDED:
        parser.error("--serve needs --recording: where to keep what is recorded")
    return args


def _record(args: argparse.Namespace) -> None:
    plan = Plan(args.trace, args.requests, args.speed, *args.shrink)
    with tempfile.TemporaryDirectory(prefix="extproc-fit-") as logs:
        made = asyncio.run(record(args.serve, args.max_num_seqs, plan, Path(logs) / "vllm.log"))
    recording.write(made, args.recording)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        if args.json:
            args.json.open("a").close()  # now, not after minutes
        if args.serve:
            args.recording.open("a").close()
            _record(args)
        recorded = recording.read(args.recording)
    except (ProcessError, ScrapeError, RuntimeError, OSError, ValueError) as error:
        print(f"fit: {error}", file=sys.stderr)
        return 1
    fitted = fit(recorded)
    _print(recorded, fitted)
    if args.json:
        runs = [one.to_json() for one in fitted]
        args.json.write_text(json.dumps({"about": recorded.about, "runs": runs}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
