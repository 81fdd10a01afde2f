"""Counts the instructions of a decision and of a whole request: a guard that needs no idle machine.

    python -m benchmarks.instructions            # compares with instructions.json
    python -m benchmarks.instructions --update   # writes the counts of this Python and numpy

The decisions are those of :mod:`benchmarks.decision` on 100 replicas, each with its entry and
release in the ledger and the polls in between. The requests are those of
:mod:`benchmarks.in_process` on 8 replicas. The exit status is 1 if a count is above 1.05 times the
committed count, and 2 if valgrind is missing or the file has no counts for these versions.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.decision import SteadyRouter
from benchmarks.in_process import RequestLoad

FILE = Path(__file__).with_suffix(".json")
STEPS = 1000
_WARM_UP = 100
_KV_USAGE = 0.02
_MOST = 1.05
_COUNT = re.compile(rb"Collected : (\d+)")
_VALGRIND = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")
_FIXED = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions")
    parser.add_argument("--update", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--play", nargs=2, help=argparse.SUPPRESS)  # for the process under valgrind
    args = parser.parse_args(argv)
    if args.play is not None:
        played, steps = args.play
        _PLAYS[played](int(steps))
        return 0
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    known: dict[str, dict[str, int]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    before, counted = known.get(versions, {}), dict[str, int]()
    for played in _PLAYS:
        try:
            started, whole = (_instructions(played, n) for n in (_WARM_UP, _WARM_UP + STEPS))
        except FileNotFoundError:
            print("instructions: valgrind is not installed", file=sys.stderr)
            return 2
        counted[played] = (whole - started) // STEPS
        line = f"{counted[played]:,} instructions a {played} ({versions})"
        print(f"{line}; committed: {before.get(played)}", flush=True)
    if args.update:
        FILE.write_text(json.dumps(known | {versions: counted}, indent=1, sort_keys=True) + "\n")
        return 0
    if before.keys() != counted.keys():
        print(
            f"instructions: {FILE.name} has no counts for {versions}: use --update", file=sys.stderr
        )
        return 2
    return int(any(counted[played] > _MOST * before[played] for played in _PLAYS))


def _decide(steps: int) -> None:
    router = SteadyRouter("completion", 100, _KV_USAGE, adapters=0, in_flight=5)
    for _ in range(steps):
        router.step()


def _serve(steps: int) -> None:
    async def serve() -> None:
        requests = RequestLoad(8, in_flight=64)
        for _ in range(steps):
            await requests.step()

    asyncio.run(serve())


_PLAYS: dict[str, Callable[[int], None]] = {"decision": _decide, "request": _serve}


def _instructions(played: str, steps: int) -> int:
    """Number of CPU instructions of a process that plays ``steps`` decisions or requests.

    Raises:
        FileNotFoundError: valgrind is not installed.
        CalledProcessError: the process failed.
    """
    program = [sys.executable, "-m", "benchmarks.instructions", "--play", played, str(steps)]
    run = subprocess.run(
        [*_VALGRIND, *program], env=os.environ | _FIXED, check=True, capture_output=True
    )
    found = _COUNT.search(run.stderr)
    assert found is not None, run.stderr.decode()
    return int(found[1])


if __name__ == "__main__":
    raise SystemExit(main())
