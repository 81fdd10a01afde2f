"""Network addresses as people write them: ``host:port``, ``1.2.3.4:80``, ``[::1]:80``."""

import ipaddress
import re
from contextlib import suppress
from socket import gethostname

from extproc.ground.runtime import look_up

_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[^\s\[\]/]*:[^\s\[\]/]*)\]|(?P<host>[^\s\[\]/:@]+)):(?P<port>\d{1,5})", re.ASCII
)
_MAX_PORT = 65_535


def split_address(address: str, least_port: int = 0) -> tuple[str, int]:
    """Returns host (IPv6 without brackets) and port; raises ValueError if malformed.

    A server that listens at port 0 gets any free port; clients connect to port 1 or above.
    """
    match = _ADDRESS.fullmatch(address.strip())
    if match is None or not least_port <= int(match["port"]) <= _MAX_PORT:
        raise ValueError(
            f"{address!r} is not an address of the form host:port or [ipv6]:port, with a port "
            f"from {least_port} to {_MAX_PORT}"
        )
    return match["ipv6"] or match["host"], int(match["port"])


def process_address(name: str) -> str:
    """Returns ``host:port`` from the name ``host:port:random`` of a router or poller."""
    return name.rpartition(":")[0]


def is_ip(host: str) -> bool:
    """Returns True for an IPv4 address, or an IPv6 address without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def reachable(address: str) -> str:
    """Returns the address at which others reach a server that listens on ``host:port``.

    The address is the same unless the server listens on all addresses (``0.0.0.0`` or ``[::]``):
    then the host is the IP address of the host name, because other pods cannot look up the name of
    a pod. If the host name stands for loopback or cannot be looked up, the name itself is used.
    """
    host, port = split_address(address)
    if not is_ip(host) or not ipaddress.ip_address(host).is_unspecified:
        return address
    name = gethostname()
    with suppress(OSError, UnicodeError):
        for found in map(ipaddress.ip_address, await look_up(name)):
            same_family = host != "0.0.0.0" or found.version == 4
            if same_family and not (found.is_loopback or found.is_link_local):
                return join_address(str(found), port)
    return join_address(name, port)


def within_reach(address: str, process: str) -> bool:
    """Returns True unless ``address`` is a loopback address of another machine.

    ``process``: the process that listens at ``address``, as ``host:port`` with its machine as host.
    """
    host, _ = split_address(address)
    loopback = host == "localhost" or (is_ip(host) and ipaddress.ip_address(host).is_loopback)
    return not loopback or process.rpartition(":")[0] == gethostname()


def with_name(address: str, name: str) -> str:
    """Returns ``name (address)``, or the address alone if the name is empty or equals it."""
    return address if name in ("", address) else f"{name} ({address})"


def join_address(host: str, port: int) -> str:
    """Returns ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
