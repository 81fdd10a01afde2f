"""Parses and checks the URL of Redis."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio.connection import parse_url

from extproc.ground.files import read_certificates
from extproc.ground.text import suggest
from extproc.ground.tls import load_pair

_FORMS = (
    "not an address of Redis: write redis://[user:password@]host:port/database, "
    "rediss:// for TLS, or unix:///path; percent-encode special characters in a password"
)
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("db", "username", "password", "client_name"), ()),
    **dict.fromkeys(("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ciphers"), ()),
    "protocol": ("2", "3"),
    "ssl_cert_reqs": ("required", "optional", "none"),
    "ssl_check_hostname": ("yes", "true", "1", "no", "false", "0"),
}
"""Options after the ``?`` by redis-py's names, with the allowed values; empty: any value."""


def connection_options(url: str) -> dict[str, Any]:
    """Returns redis-py's arguments for a URL; a ``redis://`` URL may lack the host.

    Raises:
        ValueError: the URL is no Redis URL, or names TLS files that cannot be used. The message
            quotes no part of the URL that may be secret.
    """
    if url.startswith(("redis+", "rediss+")):
        raise ValueError("set redis.sentinels and redis.service, or redis.cluster")
    try:
        parts = urlsplit(url)
        options: dict[str, Any] = dict(parse_url(url))
    except ValueError as error:
        readable = str(error).startswith("Invalid value for")
        raise ValueError(str(error) if readable else _FORMS) from None
    if parts.fragment or (not parts.path if parts.scheme == "unix" else parts.port == 0):
        raise ValueError(_FORMS)
    if parts.scheme != "unix" and not parts.path.strip("/").isdecimal() and parts.path.strip("/"):
        raise ValueError("the database of Redis is a number: redis://host:port/0")
    for name, values in parse_qs(parts.query, keep_blank_values=True).items():
        _check_option(name, values[0], parts.scheme == "rediss")
    _check_files(options)
    return options


def _check_option(name: str, value: str, tls: bool) -> None:
    if name not in _OPTIONS:  # not quoted: the name may be the rest of a password with a '?'
        hint = suggest(name, _OPTIONS) or f"; known options: {', '.join(_OPTIONS)}"
        raise ValueError(f"unknown option after the '?'{hint}")
    if name.startswith("ssl_") and not tls:
        raise ValueError(f"option {name!r} is for TLS: write rediss in place of redis")
    if (choices := _OPTIONS[name]) and value.lower() not in choices:
        raise ValueError(f"option {name!r} after the '?' takes one of {', '.join(choices)}")


def _check_files(options: Mapping[str, Any]) -> None:
    """Loads the TLS files, so that a bad file ends the command before anything runs."""
    authority, certificate, key = map(options.get, ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"))
    if authority is not None:
        read_certificates("ssl_ca_certs", Path(authority))
    if key and not certificate:
        raise ValueError("ssl_keyfile is given without ssl_certfile: set both")
    if certificate:
        read_certificates("ssl_certfile", Path(certificate))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        setting = "ssl_keyfile" if key else "ssl_certfile without ssl_keyfile"
        load_pair(context, setting, Path(certificate), key and Path(key))
