"""TLS on HTTP ports."""

import ssl
from typing import Any

from extproc.config import CertificateFiles
from extproc.tls.renewed import Renewed


def server_context(files: CertificateFiles, section: str) -> ssl.SSLContext | None:
    """What a port is opened with; None: plain text.

    Args:
        files: its settings.
        section: the part of the configuration that they are in, for messages.

    Raises:
        CertificateError: a file cannot be used; the message names it.
    """
    if files.tls_cert is None:
        return None
    renewed = Renewed(files, section, "Browsers and Prometheus")
    current = _context(files)

    def before_handshake(connection: Any, *_: object) -> None:
        nonlocal current
        if renewed.news() is not None:
            current = _context(files)
        connection.context = current

    first = _context(files)
    first.sni_callback = before_handshake
    return first


def _context(files: CertificateFiles) -> ssl.SSLContext:
    assert files.tls_cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.tls_cert, files.tls_key, password="")
    return context
