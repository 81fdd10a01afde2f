"""Draws a benchmark's report again, from the JSON that it wrote."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import arguments
from benchmarks.report import markdown


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.command("report", __doc__)
    parser.add_argument("results", type=Path, metavar="FILE.json", help="what --json wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="made if need be")
    args = parser.parse_args(argv)
    try:
        print(markdown.write(json.loads(args.results.read_bytes()), args.out))
    except ValueError as error:  # no JSON, no UTF-8, no result
        print(f"report: {args.results}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
