"""Draws a benchmark's report again, from the JSON that it wrote.

python -m benchmarks.report results.json --out DIR
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("results", type=Path, metavar="FILE.json", help="what --json wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="made if need be")
    args = parser.parse_args(argv)
    try:
        print(report.write(_read(args.results), args.out))
    except ValueError as error:
        print(f"report: {args.results}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def _read(path: Path) -> dict[str, object]:
    try:
        results: dict[str, object] = json.loads(path.read_bytes())
    except ValueError as error:  # no UTF-8, too
        raise ValueError(f"not JSON: {error}") from None
    return results


if __name__ == "__main__":
    sys.exit(main())
