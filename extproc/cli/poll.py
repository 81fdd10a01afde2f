"""``extproc poll``."""

import argparse

from extproc.cli.configuration import add_flags
from extproc.cli.service import run_service
from extproc.poll.into_redis import run_poller


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of what a poller reads."""
    add_flags(parser, "", "poll", "hold.objectives", "redis", "admin", "log")


def run(args: argparse.Namespace) -> int:
    """Runs a poller until SIGTERM or SIGINT."""
    return run_service(args, run_poller)
