"""Draws the report of a benchmark from the JSON that the benchmark wrote."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import arguments
from benchmarks.report import markdown


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.command("report", __doc__)
    parser.add_argument("results", type=Path, metavar="FILE.json", help="file that --json wrote")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the report"
    )
    args = parser.parse_args(argv)
    try:
        print(markdown.write(json.loads(args.results.read_bytes()), args.out))
    except ValueError as error:  # not JSON, not UTF-8, not a result
        print(f"report: {args.results}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
