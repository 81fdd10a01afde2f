"""Network addresses as people write them: ``host:port``, ``1.2.3.4:80``, ``[::1]:80``."""

import ipaddress
import re

_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[^\s\[\]/]*:[^\s\[\]/]*)\]|(?P<host>[^\s\[\]/:@]+)):(?P<port>\d{1,5})", re.ASCII
)
_MAX_PORT = 65_535


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port, without the brackets of an IPv6 host; else raises ValueError."""
    match = _ADDRESS.fullmatch(address.strip())
    if match is None or int(match["port"]) > _MAX_PORT:
        raise ValueError(f"{address!r} is not an address of the form host:port or [ipv6]:port")
    return match["ipv6"] or match["host"], int(match["port"])


def process_address(name: str) -> str:
    """Returns host and port of a router or poller, without the part of its name that is new with
    each start."""
    return name.rpartition(":")[0]


def is_ip(host: str) -> bool:
    """Returns True for an IPv4 or IPv6 address, without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def with_name(address: str, name: str) -> str:
    """Returns ``name (address)``, or the address alone if the name is empty or the same."""
    return address if name in ("", address) else f"{name} ({address})"


def join_address(host: str, port: int) -> str:
    """Returns ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
