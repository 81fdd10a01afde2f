"""What the commands have in common that take the configuration and run until they are stopped."""

import argparse
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from extproc.cli.configuration import configured
from extproc.cli.errors import CommandError, UsageError
from extproc.config import Config
from extproc.observe import logs

logger = logging.getLogger(__name__)


def run_service(
    args: argparse.Namespace, service: Callable[[Config], Coroutine[Any, Any, None]]
) -> int:
    """Runs a service until it is told to stop."""
    config = configured(args)
    logs.setup(config.log)
    try:
        uvloop.run(service(config))
    except (OSError, ValueError) as error:  # an address in use; a tokenizer that is not there
        logger.debug("ended by an error", exc_info=error)
        kind = UsageError if isinstance(error, ValueError) else CommandError
        raise kind(error) from None
    return 0
