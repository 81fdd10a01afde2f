"""Loopback ports for the processes of a stack."""

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType

_ANY = 0
_TRIES = 100


def pick_ports(
    wanted: Mapping[str, int], in_a_row: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """A free TCP port of the loopback address for every name, all different.

    Args:
        wanted: the port each name would like; one that is taken, or 0, becomes any free one.
        in_a_row: names that need so many ports from theirs on.

    Raises:
        OSError: there are none.
    """
    with ExitStack() as held:  # bound until all are chosen, so that none is chosen twice
        return {name: _pick(port, in_a_row.get(name, 1), held) for name, port in wanted.items()}


def _pick(port: int, count: int, held: ExitStack) -> int:
    for _ in range(_TRIES):
        with ExitStack() as tried:
            try:
                first = _bind(port, tried)
                for other in range(first + 1, first + count):
                    _bind(other, tried)
            except OSError:
                port = _ANY
            else:
                held.enter_context(tried.pop_all())
                return first
    raise OSError(f"found no {count} free ports in a row on 127.0.0.1")


def _bind(port: int, held: ExitStack) -> int:
    probe = held.enter_context(socket.socket())
    # As servers do: connections of a server that just ended do not hold its port.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", port))
    chosen: int = probe.getsockname()[1]
    return chosen
