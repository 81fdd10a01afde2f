"""A worker process: a whole router, started by a supervisor (``python -m extproc.proxy.worker``).

Standard input brings the pickled configuration and then stays open for as long as the supervisor
lives. Standard output takes one line: ``ready``, or why there is no router.
"""

import logging
import os
import pickle
import sys
from threading import Thread

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's C core would log beside our own lines

import uvloop

from extproc.config import Config
from extproc.observe import logs
from extproc.proxy.app import run_router
from extproc.proxy.supervisor import READY

_STDIN, _STDOUT, _STDERR = 0, 1, 2

logger = logging.getLogger(__name__)


def main(number: int) -> int:
    """Runs the router until it is told to stop; the exit status."""
    config: Config = pickle.load(sys.stdin.buffer)
    logs.setup(config.log, worker=number)
    Thread(target=_end_with_the_supervisor, daemon=True).start()
    try:
        uvloop.run(run_router(config, number, ready=lambda: _tell(READY)))
    except (OSError, ValueError) as error:
        _tell(str(error))
        logger.debug("ended by an error", exc_info=error)
        return 1
    return 0


def _tell(line: str) -> None:
    """The one line for the supervisor; what is printed later goes where logs go."""
    print(line.replace("\n", " "), flush=True)
    os.dup2(_STDERR, _STDOUT)


def _end_with_the_supervisor() -> None:
    """Ends at once when the supervisor is gone: its successor needs the ports.

    Envoy goes on without a router whose streams are cut.
    """
    os.read(_STDIN, 1)  # nothing more ever comes: this is the end of the supervisor
    logger.error("the supervisor is gone: this worker ends")
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
