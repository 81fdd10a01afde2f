"""Network addresses as people write them: ``host:port``, ``1.2.3.4:80``, ``[::1]:80``."""

import re

_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[^\s\[\]/]*:[^\s\[\]/]*)\]|(?P<host>[^\s\[\]/:@]+)):(?P<port>\d{1,5})",
    re.ASCII,
)
_MAX_PORT = 65_535


def split_address(address: str) -> tuple[str, int]:
    """Return host and port; an IPv6 host without its brackets.

    Raises:
        ValueError: it is not ``host:port``.
    """
    match = _ADDRESS.fullmatch(address.strip())
    if match is None or int(match["port"]) > _MAX_PORT:
        raise ValueError(f"{address!r} is not an address of the form host:port or [ipv6]:port")
    return match["ipv6"] or match["host"], int(match["port"])


def shift_port(address: str, by: int) -> str:
    """Return the address with a port higher by so much; port 0 (any free one) stays 0.

    Raises:
        ValueError: the port would be none, or it is no ``host:port``.
    """
    host, port = split_address(address)
    shifted = port and port + by
    if shifted > _MAX_PORT:
        raise ValueError(f"{address} and {by} ports after it: there is no port {shifted}")
    return join_address(host, shifted)


def with_name(address: str, name: str) -> str:
    """Return the address after its name, where it has one of its own: ``a (1.2.3.4:80)``."""
    return address if name in ("", address) else f"{name} ({address})"


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
