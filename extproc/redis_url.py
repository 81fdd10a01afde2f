"""The URL of Redis in all its forms, taken apart; what is wrong is told without the password."""

import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from extproc.ground.address import split_address
from extproc.ground.files import read_certificates, read_file
from extproc.ground.text import suggest

_FORMS = (
    "not an address of Redis: write redis://[user:password@]host:port/database, "
    "rediss:// for TLS, unix:///path, redis+sentinel://host:port,host:port/service, or "
    "redis+cluster://host:port,host:port; percent-encode what is special in a password"
)
# Not urlsplit: whether it takes several hosts with an IPv6 address among them depends on Python's
# patch version.
_PARTS = re.compile(
    r"(?P<scheme>[^:/?#]+)://(?P<hosts>[^/?#]*)(?P<path>[^?#]*)(\?(?P<query>[^#]*))?(?P<rest>#.*)?"
)
_SCHEME = re.compile(r"(?P<tls>rediss?)(\+(?P<form>sentinel|cluster))?|(?P<unix>unix)")
_PORTS = {"single": 6379, "sentinel": 26379, "cluster": 6379}

Node = tuple[str, int]
"""Host and port."""

Options = Mapping[str, Any]
"""Arguments of redis-py's clients."""


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What a URL says."""

    form: str
    """``single``, ``unix``, ``sentinel`` or ``cluster``."""
    tls: bool = False
    path: str = ""
    """The socket, or the name of the service that the Sentinels watch."""
    nodes: tuple[Node, ...] = ()
    """The server; or the Sentinels, or nodes of the Cluster, to ask where it is."""
    options: Options = field(default_factory=dict, repr=False)
    """User, password, database, TLS."""


def parse(url: str) -> RedisUrl:
    """Take a URL apart.

    Raises:
        ValueError: it is none, or names TLS files that cannot be used. The message holds nothing of
            what may be secret.
    """
    parts = _PARTS.fullmatch(url)
    scheme = parts and _SCHEME.fullmatch(parts["scheme"].lower())
    if parts is None or scheme is None or parts["rest"]:
        raise ValueError(_FORMS)
    given = parse_qsl(parts["query"] or "", keep_blank_values=True)
    login, _, listed = parts["hosts"].rpartition("@")
    tls = scheme["tls"] == "rediss"
    form = scheme["unix"] or scheme["form"] or "single"
    nodes = () if form == "unix" else _nodes(listed, form)
    path, database = _path(form, unquote(parts["path"]))
    options = _login(login) | ({"db": database} if database else {})
    options |= dict(_option(name, text, form, tls) for name, text in given)
    if tls:
        _check_files(options)
    return RedisUrl(form, tls, path, nodes, options)


def _login(login: str) -> dict[str, Any]:
    user, _, password = login.partition(":")
    return {
        name: unquote(text) for name, text in (("username", user), ("password", password)) if text
    }


def _nodes(listed: str, form: str) -> tuple[Node, ...]:
    hosts = listed.split(",")
    try:
        if form == "single":
            (_,) = hosts
        with_port = (one if re.search(r":\d*$", one) else f"{one}:{_PORTS[form]}" for one in hosts)
        return tuple(map(split_address, with_port))
    except ValueError:  # its own message may quote a part of the password
        raise ValueError(_FORMS) from None


def _path(form: str, path: str) -> tuple[str, int]:
    """Socket or service, and database."""
    if form == "unix":
        if not path:
            raise ValueError("the path of Redis's socket is missing: unix:///run/redis.sock")
        return path, 0
    service, database = "", path[1:]
    if form == "sentinel":
        service, _, database = path[1:].rpartition("/")
        if not database.isdecimal():
            service, database = path[1:].rstrip("/"), ""
        if not service:
            raise ValueError(
                "the name of the service that the Sentinels watch is missing: "
                "redis+sentinel://host:port,host:port/service"
            )
    if database and not database.isdecimal():
        raise ValueError("the database of Redis is a number: redis://host:port/0")
    if form == "cluster" and int(database or 0):
        raise ValueError("a Redis Cluster has no database but 0")
    return service, int(database or 0)


def _option(name: str, text: str, form: str, tls: bool) -> tuple[str, Any]:
    known = _OPTIONS | (_SENTINEL_OPTIONS if form == "sentinel" else {})
    if name not in known:  # it is not quoted: a '?' in a password makes one, too
        hint = suggest(name, known) or f"; there are {', '.join(known)}"
        raise ValueError(f"unknown option after the '?'{hint}")
    if name.startswith("ssl_") and not tls:
        raise ValueError(f"option {name!r} is for TLS: write rediss in place of redis")
    try:
        return name, known[name](text)
    except ValueError as error:
        raise ValueError(f"option {name!r} after the '?' must be {error}") from None


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a number")
    return int(text)


def _yes_or_no(text: str) -> bool:
    if text.lower() not in ("yes", "true", "1", "no", "false", "0"):
        raise ValueError("yes or no")
    return text.lower() in ("yes", "true", "1")


def _requirement(text: str) -> str:
    if text not in ("required", "optional", "none"):
        raise ValueError("required, optional or none")
    return text


def _check_files(options: Options) -> None:
    """Looks whether the files of TLS can be used, while somebody is there to be told."""
    authority, certificate, key = map(options.get, ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"))
    if authority is not None:
        read_certificates("ssl_ca_certs", Path(authority))
    for name in ("ssl_certfile", "ssl_keyfile"):
        if name in options:
            read_file(name, Path(options[name]))
    if key and not certificate:
        raise ValueError("ssl_keyfile is given without ssl_certfile, the certificate of that key")
    try:
        if certificate:  # with a password, though a wrong one: else it would ask on the terminal
            ssl.create_default_context().load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        files = f"{certificate} and {key or certificate}"
        reason = error.reason or "a key with a password cannot be used"
        raise ValueError(f"ssl_certfile and ssl_keyfile: {files}: {reason}") from None


_OPTIONS: dict[str, Callable[[str], object]] = {
    "db": _number,
    "username": str,
    "password": str,
    "client_name": str,
    "protocol": _number,
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_cert_reqs": _requirement,
    "ssl_check_hostname": _yes_or_no,
    "ssl_ciphers": str,
}
"""As redis-py calls them."""

_SENTINEL_OPTIONS: dict[str, Callable[[str], object]] = {
    "sentinel_username": str,
    "sentinel_password": str,
}
"""How to log in to the Sentinels, which have users of their own."""
