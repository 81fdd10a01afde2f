"""Commands that take the configuration and run until a signal: serve, poll and eds."""

import argparse
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from extproc.cli.arguments import CommandError, UsageError
from extproc.cli.configuration import add_flags, configured
from extproc.config import Config
from extproc.observe import logs

logger = logging.getLogger(__name__)

_SHOWN = {
    "serve": (
        *("", "serve", "route", "request", "hold", "record", "traces"),
        *("redis", "poll", "admin", "log"),
    ),
    "poll": ("", "poll", "redis", "admin", "log"),
    "eds": ("pool", "pools", "eds", "redis", "log"),
}
"""Sections and keys that the help of each command shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of what the command reads."""
    command = parser.prog.split()[-1]
    add_flags(parser, *_SHOWN[command])


def run(args: argparse.Namespace) -> int:
    """Runs the service until SIGTERM or SIGINT."""
    config = configured(args)
    logs.setup(config.log)
    try:
        uvloop.run(_service(args.command, config)(config))
    except (OSError, ValueError) as error:  # an address in use; a tokenizer that is not there
        logger.debug("ended by an error", exc_info=error)
        kind = UsageError if isinstance(error, ValueError) else CommandError
        raise kind(error) from None
    return 0


def _service(command: str, config: Config) -> Callable[[Config], Coroutine[Any, Any, None]]:
    """Imports one service alone: a command starts without the others."""
    if command == "poll":
        from extproc.poll.into_redis import run_poller

        return run_poller
    if command == "eds":
        from extproc.envoy.eds import run_eds

        return run_eds
    from extproc.proxy.app import run_router

    return run_router
