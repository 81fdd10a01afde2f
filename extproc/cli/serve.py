"""``extproc serve``."""

import argparse

from extproc.cli.configuration import add_flags
from extproc.cli.service import run_service
from extproc.server.serve import serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of what a router reads."""
    add_flags(parser, "", "serve", "route", "request", "redis", "poll", "log", "traces")
    parser.add_argument(
        "--workers",
        dest="serve.workers",
        default=argparse.SUPPRESS,
        metavar="N",
        help="short for --serve.workers",
    )


def run(args: argparse.Namespace) -> int:
    """Runs a router until SIGTERM or SIGINT."""
    return run_service(args, serve)
