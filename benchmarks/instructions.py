"""Counts the instructions of 1,000 routing decisions with valgrind: a guard without a clock.

    python -m benchmarks.instructions            # compares with instructions.json
    python -m benchmarks.instructions --update   # writes the count of this Python and numpy

The decisions are those of :mod:`benchmarks.decision` on 100 replicas, each with its entry and
release in the ledger and the polls in between. The exit status is 1 above 1.05 times the committed
count, and 2 if valgrind is missing or the file has no count for these versions.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.decision import SteadyRouter

FILE = Path(__file__).with_suffix(".json")
STEPS = 1000
REPLICAS = 100
_WARM_UP = 100
_KV_USAGE = 0.02
_IN_FLIGHT = 5  # requests per replica
_MOST = 1.05
_COUNT = re.compile(rb"Collected : (\d+)")
_VALGRIND = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")
_FIXED = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions")
    parser.add_argument("--update", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)  # of the program counted
    args = parser.parse_args(argv)
    if args.steps is not None:
        _play(args.steps)
        return 0
    try:
        started, whole = (_instructions(steps) for steps in (_WARM_UP, _WARM_UP + STEPS))
    except FileNotFoundError:
        print("instructions: valgrind is not installed", file=sys.stderr)
        return 2
    counted = (whole - started) // STEPS
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    known: dict[str, int] = json.loads(FILE.read_text()) if FILE.exists() else {}
    before = known.get(versions)
    print(f"{counted:,} instructions a decision ({versions}); committed: {before}")
    if args.update:
        FILE.write_text(json.dumps(known | {versions: counted}, indent=1, sort_keys=True) + "\n")
        return 0
    if before is None:
        print(
            f"instructions: {FILE.name} has no count for {versions}: use --update", file=sys.stderr
        )
        return 2
    return int(counted > _MOST * before)


def _play(steps: int) -> None:
    router = SteadyRouter("completion", REPLICAS, _KV_USAGE, adapters=0, in_flight=_IN_FLIGHT)
    for _ in range(steps):
        router.step()


def _instructions(steps: int) -> int:
    """Instructions of a process that makes so many decisions.

    Raises:
        FileNotFoundError: valgrind is not installed.
        CalledProcessError: the process failed.
    """
    program = [sys.executable, "-m", "benchmarks.instructions", "--steps", str(steps)]
    run = subprocess.run(
        [*_VALGRIND, *program], env=os.environ | _FIXED, check=True, capture_output=True
    )
    found = _COUNT.search(run.stderr)
    assert found is not None, run.stderr.decode()
    return int(found[1])


if __name__ == "__main__":
    raise SystemExit(main())
