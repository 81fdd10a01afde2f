"""Network addresses as people write them: ``host:port``, ``1.2.3.4:80``, ``[::1]:80``."""

import ipaddress
import re

_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[^\s\[\]/]*:[^\s\[\]/]*)\]|(?P<host>[^\s\[\]/:@]+)):(?P<port>\d{1,5})", re.ASCII
)
_MAX_PORT = 65_535


def split_address(address: str) -> tuple[str, int]:
    """Returns host (IPv6 without brackets) and port; raises ValueError if malformed."""
    match = _ADDRESS.fullmatch(address.strip())
    if match is None or int(match["port"]) > _MAX_PORT:
        raise ValueError(f"{address!r} is not an address of the form host:port or [ipv6]:port")
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


def with_name(address: str, name: str) -> str:
    """Returns ``name (address)``, or the address alone if the name is empty or the address."""
    return address if name in ("", address) else f"{name} ({address})"


def join_address(host: str, port: int) -> str:
    """Returns ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
