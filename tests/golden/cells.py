"""Seeded simulations of ``docs/results.md``, compared with ``cells.json``.

python -m tests.golden.cells [--only mixed-4,agents]   # runs and compares; exits 1 on a change
python -m tests.golden.cells --update [--only …]       # writes the results of the cells
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from extproc.lab.replay.figures import distribution

FILE = Path(__file__).with_name("cells.json")
ROOT = Path(__file__).parents[2]
_CONV, _CODE, _AGENTS, _MOONCAKE = (
    "azure-2023-conv",
    "azure-2023-code",
    "agents",
    "mooncake-synthetic",
)
_RIVALS = "completion,lmetric,least_request,queue_kv,power_of_two,round_robin,least_kv"
_SHARED = "completion,lmetric,queue_kv,cache_aware"
_HELD = (_CONV, "equal", "2.4", "completion", "--hold on")
_AIMS = (_CONV, "mixed", "6", "completion")
_AIM = "--hold on --target-share 0.5 --seed 1"
CELLS: dict[str, tuple[str, str, str, str, str]] = {
    "equal-1.5": (_CONV, "equal", "1.5", _RIVALS, ""),
    "equal-1.9": (_CONV, "equal", "1.9", "completion,lmetric,least_request", ""),
    "equal-code": (_CODE, "equal", "0.9", "completion,lmetric", ""),
    "mixed-4": (_CONV, "mixed", "4", "completion,lmetric,queue_kv,least_request", ""),
    "mixed-6": (_CONV, "mixed", "6", "completion,lmetric,queue_kv", ""),
    "three-kinds": (_CONV, "three-kinds", "4", "completion,lmetric", ""),
    # The GPU slows down at second 600, after some 4,000 requests.
    "throttled": (_CONV, "throttled", "1.2", "completion", "--requests 7000 --from 600"),
    "newcomer": (_CONV, "newcomer", "1.2", "completion,lmetric", ""),
    "cold": (_CONV, "cold", "4", "completion", "--skip 46 --duration 16 --seed 1"),
    "flapping": (_CONV, "flapping", "1.2", "completion,least_request", ""),
    "profile-slow": (_CONV, "mixed", "4", "completion", "--profile-error 2 --from 60"),
    "profile-fast": (_CONV, "equal", "1.5", "completion", "--profile-error 0.5 --from 60"),
    "known-coefficients": (_CONV, "mixed", "4", "completion", "--know coefficients --from 60"),
    "known-lengths": (_CONV, "equal", "1.5", "completion", "--know lengths"),
    "oracle": (_CONV, "mixed", "4", "completion", "--requests 600 --oracle"),
    "routers-20ms": (_CONV, "equal", "1.5", "completion", "--routers 4 --share-lag 0.02"),
    "routers-1s": (_CONV, "equal", "1.5", "completion", "--routers 4 --share-lag 1"),
    "routers-alone": (_CONV, "mixed", "4", "completion", "--routers 4"),
    "routers-mixed": (_CONV, "mixed", "4", "completion", "--routers 4 --share-lag 0.02"),
    "adapters": (_CONV, "adapters", "1.3", "completion,least_request", "--adapters 24"),
    "agents": (_AGENTS, "a100", "2", _SHARED, "--requests 2500"),
    "agents-mixed": (_AGENTS, "mixed", "1.5", "completion,lmetric", "--requests 2500"),
    "agents-routers": (
        *(_AGENTS, "a100", "2", "completion"),
        "--requests 2500 --routers 4 --share-lag 0.02",
    ),
    "mooncake": (_MOONCAKE, "a100", "1", "completion,cache_aware", "--requests 2500"),
    "mooncake-held": (_MOONCAKE, "a100", "3", "completion", "--hold on"),
    "full-at-once": (_CONV, "equal", "2.4", "completion", ""),
    "full-held": _HELD,
    "full-urgent": (*_HELD[:4], "--hold on --urgent 0.3"),
    "full-tenants": (_CONV, "equal", "13", "completion", "--hold on --tenants 10,1"),
    "full-routers": (*_HELD[:4], "--hold on --routers 4 --share-lag 0.02"),
    "target-ignored": (*_AIMS, f"{_AIM} --completion-target 5 --ignore-targets"),
    "target-completion": (*_AIMS, f"{_AIM} --completion-target 5"),
    "target-ttft": (*_AIMS, f"{_AIM} --ttft-target 0.2"),
    "target-both": (*_AIMS, f"{_AIM} --ttft-target 0.3 --completion-target 5"),
}
"""Name → trace, fleet, speed, policies and further options."""
TINY = ("mixed-4", "agents")
"""Cells that the tests simulate, with :data:`TINY_REQUESTS` requests each."""
TINY_REQUESTS = 300
_REQUESTS = 4000
_DIGITS = 9
_COLUMNS = ("ttft mean", "ttft p99", "e2e mean", "e2e p99")

Figures = dict[str, Any]


def arguments_of(name: str, requests: int | None = None) -> list[str]:
    """Return the command-line arguments of a cell's simulation, without the output file."""
    trace, fleet, speed, policies, further = CELLS[name]
    words = f"--trace benchmarks/traces/{trace}.jsonl.gz --fleet benchmarks/fleets/{fleet}.yaml"
    options = further.replace("--oracle", "").split()
    if "--oracle" not in further:
        options.append("--no-oracle")
    if requests is not None or "--requests" not in further:
        options += ["--requests", str(requests or _REQUESTS)]
    return [*words.split(), "--speed", speed, "--policy", policies, *options]


def run(name: str, requests: int | None = None) -> dict[str, Figures]:
    """Simulate a cell; return the figures of each policy."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "results.json")
        command = [sys.executable, "-m", "benchmarks.simulate", *arguments_of(name, requests)]
        subprocess.run(
            [*command, "--json", output], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        runs = json.loads(output.read_text())["runs"]
    return {each["run"]["name"]: _figures(each["summary"], each["requests"]) for each in runs}


def _figures(summary: Figures, requests: list[Figures]) -> Figures:
    """Figures to nine significant digits, and a digest of all requests' replicas and times."""
    keys = ("at_s", "replica", "ttft_s", "completion_s")
    served = [[request.get(key) for key in keys] for request in requests]
    # The summary counts first tokens of streamed requests only.
    first = distribution(
        [each["ttft_s"] for each in requests if each["counted"] and "ttft_s" in each]
    )
    figures: Figures = {}
    for part, times in (("ttft", first), ("e2e", summary["e2e_s"])):
        figures |= {f"{part} {figure}": value for figure, value in (times or {}).items()}
    figures |= {key: summary[key] for key in ("requests", "failed", "hits", "imbalance")}
    figures |= {"preemptions": summary["preemptions"], **summary["prediction"]}
    for name, group in summary["groups"].items():
        figures |= {f"{name} in_time": group["in_time"], f"{name} e2e mean": group["e2e_s"]["mean"]}
    figures |= {name: replica["requests"] for name, replica in summary["per_replica"].items()}
    rounded = {
        key: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
        for key, value in figures.items()
    }
    return rounded | {"digest": hashlib.sha256(json.dumps(served).encode()).hexdigest()[:16]}


def recorded() -> dict[str, dict[str, Figures]]:
    """Return the results in ``cells.json``; names of the tests' cells end in ``/tiny``."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write(results: dict[str, dict[str, Figures]]) -> None:
    """Add results to ``cells.json``."""
    FILE.write_text(json.dumps(dict(sorted((recorded() | results).items())), indent=1) + "\n")


def _row(name: str, policy: str, figures: Figures, verdict: str) -> str:
    times = "".join(f"{figures[column]:11.3f}" for column in _COLUMNS)
    return f"{name:20}{policy:16}{times}  {figures['digest']}  {verdict}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run cells, print a table, and compare or write the results."""
    parser = argparse.ArgumentParser(prog="tests.golden.cells")
    parser.add_argument("--only", default=",".join(CELLS), metavar="NAME[,NAME]")
    parser.add_argument("--update", action="store_true", help="write the results")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cells at a time")
    args = parser.parse_args(argv)
    known, changed = recorded(), 0
    names = args.only.split(",")
    if unknown := set(names) - CELLS.keys():
        parser.error(f"no cell is named {', '.join(sorted(unknown))}: {', '.join(CELLS)}")
    print(f"{'cell':20}{'policy':16}{''.join(f'{column:>11}' for column in _COLUMNS)}")
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, result in zip(names, pool.map(run, names), strict=True):
            for policy, figures in result.items():
                before = known.get(name, {}).get(policy)
                verdict = "same" if before == figures else "CHANGED" if before else "new"
                changed += verdict != "same"
                print(_row(name, policy, figures, verdict), flush=True)
                if before and verdict == "CHANGED":
                    print(_row("", "(recorded)", before, ""), flush=True)
            if args.update:
                write({name: result})
    return int(changed > 0 and not args.update)


if __name__ == "__main__":
    sys.exit(main())
