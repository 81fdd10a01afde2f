"""TLS of the ports that this process opens: certificate files are tested before use, and read again
after a change.

Functions here raise ValueError with file and reason if a file cannot be used.
"""

import logging
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from extproc.ground.files import WatchedFiles, read_certificates, read_file

log = logging.getLogger(__name__)

_END = "-----END CERTIFICATE-----"


class CertificateSection(Protocol):
    """A section of the configuration with a certificate and its key."""

    @property
    def tls_cert(self) -> Path | None: ...

    @property
    def tls_key(self) -> Path | None: ...


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificate, key and authorities, read and tested; the bytes are in PEM."""

    chain: bytes  # the certificate and its intermediates
    key: bytes
    client_ca: bytes | None  # authorities of permitted clients; None: every client is permitted
    doubt: str  # reason why peers will distrust the certificate, such as its expiry; empty: none
    context: ssl.SSLContext  # with certificate and key, for an HTTP port


def read(files: CertificateSection, section: str, client_ca: Path | None = None) -> Certificates:
    """Reads and tests the files of a section, whose ``tls_cert`` and ``tls_key`` are not None."""
    assert files.tls_cert is not None
    assert files.tls_key is not None
    chain = read_certificates(f"{section}.tls_cert", files.tls_cert)
    key = read_file(f"{section}.tls_key", files.tls_key)
    authorities = client_ca and read_certificates(f"{section}.tls_client_ca", client_ca)
    context = _server_context(files.tls_cert, files.tls_key, section)
    doubt = _rejection(context, trusting(files.tls_cert))
    return Certificates(
        chain, key, authorities or None, doubt and f"{files.tls_cert}: {doubt}", context
    )


def watched(
    files: CertificateSection, section: str, peers: str, client_ca: Path | None = None
) -> WatchedFiles[Certificates]:
    """Watches the files. Logs a warning if the clients, which the warning calls ``peers``, will not
    trust the certificate."""

    def tried() -> Certificates:
        found = read(files, section, client_ca)
        if found.doubt:
            text = f"{peers} will not trust this certificate: replace it"
            log.warning(text, extra={"reason": found.doubt})
        return found

    return WatchedFiles(
        "certificate", tried, *filter(None, (files.tls_cert, files.tls_key, client_ca))
    )


def server_context(files: CertificateSection, section: str) -> ssl.SSLContext | None:
    """Returns the TLS context of an HTTP port, or None if the port is plain text."""
    if files.tls_cert is None:
        return None
    renewed = watched(files, section, "Browsers and Prometheus")
    first = current = renewed.read().context

    def before_handshake(connection: Any, *_: object) -> None:
        nonlocal current
        if (changed := renewed.if_changed()) is not None:
            current = changed.context
        connection.context = current

    first.sni_callback = before_handshake
    return first


def _server_context(cert: Path, key: Path, section: str) -> ssl.SSLContext:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(cert, key, password="")  # refuses an encrypted key, as gRPC does
    except ssl.SSLError as error:
        reason = f"cannot be used with {cert}: {error.reason}"
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            reason = f"is not the key of the certificate in {cert}"
        elif error.reason is None:
            reason = "holds no key (PEM), or one with a password"
        raise ValueError(f"{section}.tls_key: {key}: {reason}") from None
    return server


def trusting(certificate: Path) -> ssl.SSLContext:
    """Returns a client's context that trusts only the first certificate in the file, whatever its
    issuer and host name."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        own, end, _ = certificate.read_text("ascii", "ignore").partition(_END)
        client.load_verify_locations(cadata=own + end)
    except ssl.SSLError:
        raise ValueError(f"{certificate} holds no certificate (PEM)") from None
    except OSError as error:
        raise ValueError(f"{certificate}: {error.strerror}") from None
    return client


def _rejection(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """Returns why the client rejects the server, in OpenSSL's words, or an empty string."""
    upwards, downwards = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(downwards, upwards), server.wrap_bio(upwards, downwards, True)
    try:
        for end in (*ends, *ends):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        return f"no handshake succeeds with it: {error.reason}"
    return ""
