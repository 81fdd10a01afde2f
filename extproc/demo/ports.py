"""Loopback ports for the processes of a stack."""

import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress

_ANY = 0


def pick_ports(wanted: Mapping[str, int]) -> dict[str, int]:
    """A free TCP port of the loopback address for every name, all different.

    Args:
        wanted: the port each name would like; one that is taken, or 0, becomes any free one.
    """
    with ExitStack() as held:  # bound until all are chosen, so that none is chosen twice
        return {name: _bind(port, held) for name, port in wanted.items()}


def pick_run(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with ExitStack() as held, suppress(OSError):
            first = _bind(_ANY, held)
            for port in range(first + 1, first + count):
                _hold(port, held)
            return first


def _bind(port: int, held: ExitStack) -> int:
    try:
        return _hold(port, held)
    except OSError:
        if port == _ANY:
            raise
        return _hold(_ANY, held)


def _hold(port: int, held: ExitStack) -> int:
    probe = held.enter_context(socket.socket())
    # As servers do: connections of a server that just ended do not hold its port.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", port))
    chosen: int = probe.getsockname()[1]
    return chosen
