"""``extproc xds``."""

import argparse

from extproc.cli.configuration import add_flags
from extproc.cli.service import run_service
from extproc.envoy.xds.control_plane import run_xds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of what a control plane reads."""
    add_flags(parser, "pool", "pools", "xds", "redis", "poll.ttl_s", "log")


def run(args: argparse.Namespace) -> int:
    """Runs a control plane until SIGTERM or SIGINT."""
    return run_service(args, run_xds)
