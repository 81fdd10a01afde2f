"""Name lookups: one that hangs holds up nothing but itself.

The system's resolver can be neither cancelled nor bounded. The loop's own ``getaddrinfo`` runs it
on a few threads shared with every other lookup and connection, which a name server that does not
answer would fill (uvloop has four).
"""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Host name to IP addresses; raises ``OSError`` when there are none."""


async def resolve_host(host: str) -> Sequence[str]:
    """Ask the system's resolver, on a thread of its own that keeps no program from its end.

    Raises:
        OSError: the name has no address.
        UnicodeError: it can be no host's name.
    """
    answer: Future[Sequence[str]] = Future()
    answer.set_running_or_notify_cancel()  # the thread answers, whether or not anybody still waits
    threading.Thread(target=_ask, args=(host, answer), name=f"resolve {host}", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _ask(host: str, answer: Future[Sequence[str]]) -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except Exception as error:
        answer.set_exception(error)
    else:
        answer.set_result([str(sockaddr[0]) for *_, sockaddr in found])


class Lookups:
    """At most one lookup of each host at a time; an answer that comes late serves the next caller.

    Args:
        resolve: looks a host up.
        timeout_s: seconds a caller waits.
    """

    def __init__(self, resolve: Resolve, timeout_s: float) -> None:
        self._resolve = resolve
        self._timeout_s = timeout_s
        self._running: dict[str, asyncio.Future[Sequence[str]]] = {}

    async def addresses(self, host: str) -> Sequence[str]:
        """Return the host's IP addresses.

        Raises:
            OSError: it has none, or there was no answer in time.
            UnicodeError: it can be no host's name.
        """
        lookup = self._running.get(host)
        if lookup is None:
            lookup = self._running[host] = asyncio.ensure_future(self._resolve(host))
        await asyncio.wait([lookup], timeout=self._timeout_s)
        if not lookup.done():
            raise TimeoutError(f"no answer within {self._timeout_s:g} s")
        del self._running[host]
        return lookup.result()

    def forget_all_but(self, hosts: set[str]) -> None:
        """Drop answers nobody will ask for; what still hangs is kept, so as not to be doubled."""
        for host in self._running.keys() - hosts:
            if self._running[host].done():
                self._running.pop(host).exception()  # has it seen, or asyncio would log it
