"""Host names to addresses: a lookup that hangs holds up nothing but itself.

The system's resolver can be neither cancelled nor bounded. The loop's own ``getaddrinfo`` has a few
threads for all lookups and connections (uvloop four), and a silent name server would fill them.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import in_daemon_thread

log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Host name to IP addresses, perhaps none; raises ``OSError`` when no name server tells."""

_NONE = socket.EAI_NONAME, socket.EAI_NODATA


async def resolve_host(host: str) -> Sequence[str]:
    """Asks the system's resolver, on a thread of its own.

    Raises:
        OSError: no name server tells whether the name has addresses.
        UnicodeError: no host can have that name.
    """
    ask = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    try:
        return [str(sockaddr[0]) for *_, sockaddr in await in_daemon_thread(ask)]
    except socket.gaierror as error:
        if error.errno in _NONE:
            return []
        raise


class Host:
    """A host name, or an address, looked up again and again; a failure keeps the last answer.

    An answer that takes longer than ``timeout_s`` serves the next look.
    """

    def __init__(self, name: str, resolve: Resolve, timeout_s: float) -> None:
        self.addresses: tuple[str, ...] = ()  # of one family, in order
        self._name = name
        self._resolve = resolve
        self._timeout_s = timeout_s
        self._lookup: asyncio.Future[Sequence[str]] | None = None
        begins, over = "replica's host does not resolve, retrying", "replica's host resolves again"
        self._trouble = OutageLog(log, begins, over, host=name)

    @property
    def is_asked(self) -> bool:
        return self._lookup is not None and not self._lookup.done()

    @property
    def problem(self) -> str:
        """Why the last look failed; empty: it did not."""
        return self._trouble.problem

    async def look_up(self) -> None:
        try:
            self.addresses = one_family(await self._found())
        except (OSError, UnicodeError) as error:
            self._trouble.failed(error)
        else:
            if self.addresses:
                self._trouble.recovered()
            else:
                self._trouble.failed("the name has no address")

    async def _found(self) -> Sequence[str]:
        if is_address(self._name):
            return [self._name]
        if self._lookup is None:
            self._lookup = asyncio.ensure_future(self._resolve(self._name))
            # asyncio would log a failure that no look asks for any more.
            self._lookup.add_done_callback(lambda lookup: lookup.cancelled() or lookup.exception())
        await asyncio.wait([self._lookup], timeout=self._timeout_s)
        if self.is_asked:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s")
        lookup, self._lookup = self._lookup, None
        return lookup.result()


def is_address(host: str) -> bool:
    """Tells an IP address from a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def one_family(addresses: Iterable[str]) -> tuple[str, ...]:
    """Sorts the addresses; of a replica with IPv4 and IPv6 it keeps IPv4."""
    ips = sorted(map(ipaddress.ip_address, addresses), key=lambda ip: (ip.version, int(ip)))
    return tuple(dict.fromkeys(str(ip) for ip in ips if ip.version == ips[0].version))
