"""The files that a TLS connection to Redis needs."""

import ssl
from pathlib import Path

from extproc.store.url import Options


def check_files(options: Options) -> None:
    """Look whether the files can be used, while somebody is there to be told.

    Raises:
        ValueError: one of them cannot; the message names it.
    """
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in options:
            _check_readable(name, Path(options[name]))
    authority, certificate, key = map(options.get, ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"))
    if key and not certificate:
        raise ValueError("ssl_keyfile is given without ssl_certfile, the certificate of that key")
    context = ssl.create_default_context()
    try:
        if authority:
            context.load_verify_locations(authority)
    except ssl.SSLError:
        raise ValueError(f"ssl_ca_certs: {authority} holds no certificate (PEM)") from None
    try:
        if certificate:  # with a password, though a wrong one: else it would ask on the terminal
            context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        files = f"{certificate} and {key or certificate}"
        reason = error.reason or "a key with a password cannot be used"
        raise ValueError(f"ssl_certfile and ssl_keyfile: {files}: {reason}") from None


def _check_readable(name: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error.strerror}") from None
