"""A poller whose host names and service account depend on files that scenes change.

``python -m tests.chaos.poller FOLDER ARG …`` runs ``extproc ARG …``. Host names under ``.test``
resolve to loopback while ``FOLDER/hosts`` exists; without it, no name server answers.
"""

import socket
import sys
from pathlib import Path
from typing import Any

from extproc.cli import main
from extproc.poll import reflector

HOSTS = "hosts"  # file whose absence is the outage of DNS
_DOMAIN = ".test"
_getaddrinfo = socket.getaddrinfo


def _look_up(folder: Path) -> Any:
    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        if not host.endswith(_DOMAIN):
            return _getaddrinfo(host, *arguments, **options)
        if not (folder / HOSTS).exists():
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return _getaddrinfo("127.0.0.1", *arguments, **options)

    return getaddrinfo


if __name__ == "__main__":
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    socket.getaddrinfo = _look_up(folder)
    reflector.ACCOUNT = folder / "account"
    sys.exit(main(arguments))
