"""Resolution of the replicas' host names; a failure keeps the last addresses."""

import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from extproc.ground.address import is_ip
from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import SlowCall, look_up

log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Maps a host name to IP addresses, maybe none; raises ``OSError`` if no name server answers."""

_NO_ADDRESS = socket.EAI_NONAME, socket.EAI_NODATA


async def resolve_host(host: str) -> Sequence[str]:
    """Returns what :func:`look_up` finds, or nothing if the name has no address. OSError then only
    means that no name server answers."""
    try:
        return await look_up(host)
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESS:
            return []
        raise


class Host:
    """A host name or an IP address, resolved repeatedly; a failure keeps the last addresses.

    A lookup that takes longer than ``timeout_s`` goes on; the next :meth:`look_up` uses its answer.
    """

    def __init__(self, name: str, resolve: Resolve, timeout_s: float) -> None:
        self.addresses: tuple[str, ...] = ()  # all IPv4 or all IPv6, sorted
        self._name = name
        self._lookup = SlowCall(partial(resolve, name), timeout_s)
        self.outage = OutageLog(
            log,
            "replica's host does not resolve: keeping its last addresses and retrying",
            "replica's host resolves again",
            host=name,
        )

    async def look_up(self) -> None:
        try:
            found = [self._name] if is_ip(self._name) else await self._lookup.result()
            self.addresses = _one_family(found)
        except (OSError, UnicodeError) as error:
            self.outage.failed(error)
        else:
            self.outage.note("" if self.addresses else "the name has no address")


def _one_family(addresses: Iterable[str]) -> tuple[str, ...]:
    """Sorts the addresses and drops duplicates. If IPv4 and IPv6 occur, only IPv4 is kept."""
    ips = sorted(map(ipaddress.ip_address, addresses), key=lambda ip: (ip.version, int(ip)))
    return tuple(dict.fromkeys(str(ip) for ip in ips if ip.version == ips[0].version))
