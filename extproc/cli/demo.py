"""``extproc demo``."""

import argparse
from pathlib import Path

import uvloop

from extproc.cli.arguments import CommandError, UsageError, above_zero, whole
from extproc.lab.harness.processes import ProcessError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    once = "send the requests under the default policy and again under round_robin, "
    add("--once", action="store_true", help=once + "compare, and exit")
    add("--json", type=Path, metavar="FILE", help="with --once: write the figures")
    count = "with --once (default: %(default)s)"
    add("--requests", type=whole(1), default=200, metavar="N", help=count)
    rate = "with --once: per second, on average (default: %(default)g)"
    add("--rate", type=above_zero, default=20.0, metavar="R", help=rate)


def run(args: argparse.Namespace) -> int:
    if args.json is not None and not args.once:
        raise UsageError("--json needs --once")
    try:
        from extproc.lab.demo.app import demo  # needs an extra of the package
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is missing: pip install 'extproc[demo]'") from None
    try:
        return uvloop.run(demo(args))
    except ProcessError as error:
        raise CommandError(error) from None
