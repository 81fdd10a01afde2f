"""``extproc serve``, ``extproc poll`` and ``extproc eds``, which run until a signal."""

import argparse
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from extproc.cli.arguments import CommandError, UsageError
from extproc.cli.configuration import add_flags, configured
from extproc.config import Config
from extproc.ground.garbage import never_garbage
from extproc.observe import logs

logger = logging.getLogger(__name__)

_POLL = ("", "poll", "redis", "admin", "log")
_SHOWN = {  # sections and keys in the help of each command
    "serve": (*_POLL, "serve", "route", "request", "hold", "record", "traces"),
    "poll": _POLL,
    "eds": ("pool", "pools", "eds", "redis", "log"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, *_SHOWN[parser.prog.split()[-1]])


def run(args: argparse.Namespace) -> int:
    config = configured(args)
    logs.setup(config.log)
    try:
        uvloop.run(_service(args.command)(config))
    except (OSError, ValueError) as error:  # such as an address in use, or a missing tokenizer
        logger.debug("the service ended by an error", exc_info=error)
        kind = UsageError if isinstance(error, ValueError) else CommandError
        raise kind(error) from None
    return 0


def _service(command: str) -> Callable[[Config], Coroutine[Any, Any, None]]:
    """Return the service of a command, without importing other services."""
    with never_garbage():
        if command == "poll":
            from extproc.poll.into_redis import run_poller as service
        elif command == "eds":
            from extproc.envoy.eds import run_eds as service
        else:
            from extproc.proxy.app import run_router as service
    return service
