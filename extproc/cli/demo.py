"""``extproc demo``: runs the whole system with simulated replicas."""

import argparse
from pathlib import Path

import uvloop

from extproc.cli.arguments import CommandError, UsageError, above_zero, whole
from extproc.lab.harness.processes import ProcessError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    once = "send the same requests under the default policy and round_robin, compare, and exit"
    add("--once", action="store_true", help=once)
    add("--json", type=Path, metavar="FILE", help="with --once: write the figures to this file")
    count = "with --once: number of requests (default: %(default)s)"
    add("--requests", type=whole(1), default=200, metavar="N", help=count)
    rate = "with --once: mean requests per second (default: %(default)g)"
    add("--rate", type=above_zero, default=20.0, metavar="R", help=rate)


def run(args: argparse.Namespace) -> int:
    if args.json is not None and not args.once:
        raise UsageError("--json needs --once")
    try:
        from extproc.lab.demo.app import demo  # needs the extra ``demo``
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is missing: pip install 'extproc[demo]'") from None
    try:
        return uvloop.run(demo(args))
    except ProcessError as error:
        raise CommandError(error) from None
