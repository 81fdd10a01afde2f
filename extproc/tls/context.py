"""TLS on HTTP ports."""

import ssl
from typing import Any

from extproc.config import CertificateFiles
from extproc.tls.certificates import watched


def server_context(files: CertificateFiles, section: str) -> ssl.SSLContext | None:
    """What a port is opened with; None: plain text. Messages name the configuration's section."""
    if files.tls_cert is None:
        return None
    renewed = watched(files, section, "Browsers and Prometheus")
    first = current = renewed.read().context

    def before_handshake(connection: Any, *_: object) -> None:
        nonlocal current
        if (news := renewed.news()) is not None:
            current = news.context
        connection.context = current

    first.sni_callback = before_handshake
    return first
