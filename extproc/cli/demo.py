"""``extproc demo``."""

import argparse
from pathlib import Path

import uvloop

from extproc.cli.arguments import CommandError, UsageError, above_zero, whole
from extproc.lab.harness.processes import ProcessError

_REQUESTS = 200
_RATE = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo."""
    parser.add_argument(
        "--once",
        action="store_true",
        help="send the requests under the default policy and again under round_robin, "
        "compare, and exit",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --once: write the figures")
    parser.add_argument(
        "--requests",
        type=whole(1),
        default=_REQUESTS,
        metavar="N",
        help=f"with --once (default: {_REQUESTS})",
    )
    parser.add_argument(
        "--rate",
        type=above_zero,
        default=_RATE,
        metavar="R",
        help=f"with --once: per second, on average (default: {_RATE:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo until it is done, or until SIGINT or SIGTERM."""
    if args.json is not None and not args.once:
        raise UsageError("--json needs --once")
    try:
        from extproc.lab.demo.app import demo  # what it needs is an extra of the package
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is missing: pip install 'extproc[demo]'") from None
    try:
        return uvloop.run(demo(args))
    except ProcessError as error:
        raise CommandError(error) from None
