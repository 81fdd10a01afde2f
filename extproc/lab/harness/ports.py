"""Loopback ports for the processes of a stack."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from itertools import chain, cycle, islice

_HOST = "127.0.0.1"
_STRETCH = 256
_STRETCHES = range(16_384, 32_768, _STRETCH)
"""Below the ports that systems give to outgoing connections: nothing takes one of them between
its choice and its use, or while the process that had it starts again."""
_TRIES = 2 * _STRETCH


def pick_ports(wanted: Mapping[str, int]) -> dict[str, int]:
    """Returns a free TCP port of the loopback address for every name, all different: the one that
    is ``wanted`` or, where that is taken or 0, any.

    Raises:
        OSError: no port is free.
    """
    with ExitStack() as held:  # bound until all are chosen, so that none is chosen twice
        return {name: _pick(port, held) for name, port in wanted.items()}


def _pick(wanted: int, held: ExitStack) -> int:
    for port in chain([wanted] if wanted else [], islice(_own_ports(), _TRIES)):
        with suppress(OSError), ExitStack() as tried:
            _bind(port, tried)
            held.enter_context(tried.pop_all())
            return port
    raise OSError(f"found no free port on {_HOST}")


def _bind(port: int, held: ExitStack) -> None:
    probe = held.enter_context(socket.socket())
    # As servers do: connections of a server that just ended do not hold its port.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind((_HOST, port))
    probe.listen()  # or another with SO_REUSEADDR might be bound to it, too


@cache
def _own_ports() -> Iterator[int]:
    """Ports that this process alone chooses from, each a long time after it was chosen last.

    While it lives it holds the first port of its stretch.
    """
    for first in _STRETCHES:
        guard = socket.socket()
        try:
            guard.bind((_HOST, first))
        except OSError:
            guard.close()
        else:
            return _cycle(guard, range(first + 1, first + _STRETCH))
    raise OSError(f"every stretch of ports on {_HOST} is taken")


def _cycle(guard: socket.socket, ports: range) -> Iterator[int]:
    with guard:
        yield from cycle(ports)
