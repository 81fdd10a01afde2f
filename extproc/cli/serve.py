"""``extproc serve``: one router, or a supervisor of several."""

import argparse
from collections.abc import Coroutine
from typing import Any

from extproc.cli.configuration import add_flags
from extproc.cli.service import run_service
from extproc.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of what a router reads."""
    requests = ("serve", "route", "request", "hold", "record", "traces")
    add_flags(parser, "", *requests, "redis", "poll", "admin", "log")
    parser.add_argument(
        "--workers",
        dest="serve.workers",
        default=argparse.SUPPRESS,
        metavar="N",
        help="short for --serve.workers",
    )


def run(args: argparse.Namespace) -> int:
    """Runs a router until SIGTERM or SIGINT."""
    return run_service(args, _router)


def _router(config: Config) -> Coroutine[Any, Any, None]:
    if config.serve.workers > 1:
        from extproc.proxy.supervisor import supervise  # needs neither gRPC nor numpy

        return supervise(config)
    from extproc.proxy.app import run_router

    return run_router(config)
