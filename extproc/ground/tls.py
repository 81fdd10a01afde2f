"""TLS of the ports that this process opens: certificate files are tested before use, and read again
after a change.

Functions here raise ValueError with file and reason if a file cannot be used.
"""

import logging
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extproc.ground.files import WatchedFiles, read_certificates, read_file

log = logging.getLogger(__name__)

_END = "-----END CERTIFICATE-----"
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificate, key and authorities, read and tested; the bytes are in PEM."""

    chain: bytes  # the certificate and its intermediates
    key: bytes
    client_ca: bytes | None  # authorities of permitted clients; None: every client is permitted
    doubt: str  # reason why peers will distrust the certificate, such as its expiry; empty: none
    context: ssl.SSLContext  # with certificate and key, for an HTTP port


def read(section: str, cert: Path, key: Path | None, client_ca: Path | None) -> Certificates:
    """Reads and tests the files that a section of the configuration names."""
    chain = read_certificates(f"{section}.tls_cert", cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key_pem = load_pair(context, f"{section}.tls_key", cert, key)
    authorities = client_ca and read_certificates(f"{section}.tls_client_ca", client_ca)
    doubt = _rejection(context, trusting(chain))
    return Certificates(chain, key_pem, authorities or None, doubt and f"{cert}: {doubt}", context)


def watched(
    section: str, peers: str, cert: Path, key: Path | None, client_ca: Path | None = None
) -> WatchedFiles[Certificates]:
    """Watches the files. Logs a warning if the clients, which the warning calls ``peers``, will not
    trust the certificate."""

    def tried() -> Certificates:
        found = read(section, cert, key, client_ca)
        if found.doubt:
            log.warning(
                f"{peers} will not trust this certificate: replace it",
                extra={"reason": found.doubt},
            )
        return found

    return WatchedFiles("certificate", tried, *filter(None, (cert, key, client_ca)))


def server_context(section: str, cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Returns the TLS context of an HTTP port, or None if the port is plain text."""
    if cert is None:
        return None
    renewed = watched(section, "Browsers and Prometheus", cert, key)
    first = renewed.read().context

    def before_handshake(connection: Any, *_: object) -> None:
        connection.context = renewed.newest().context

    first.sni_callback = before_handshake
    return first


def load_pair(context: ssl.SSLContext, setting: str, cert: Path, key: Path | None) -> bytes:
    """Loads a certificate and its key into ``context``; returns the key. Without ``key``, the file
    ``cert`` has both. Refuses a key with a password, as gRPC does. Errors name the ``setting``."""
    key = key or cert
    content = read_file(setting, key)
    try:
        context.load_cert_chain(cert, key, password="")  # otherwise OpenSSL asks on the terminal
    except ssl.SSLError as error:
        reason = f"cannot be used with {cert}: {error.reason}"
        if error.reason in _MISMATCHES:
            reason = f"is not the key of the certificate in {cert}"
        elif error.reason is None:
            reason = "holds no key (PEM), or one with a password"
        raise ValueError(f"{setting}: {key}: {reason}") from None
    return content


def trusting(chain: bytes) -> ssl.SSLContext:
    """Returns a client's context that trusts only the first certificate of a chain (PEM), whatever
    its issuer and host name."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    own, end, _ = chain.decode("ascii", "ignore").partition(_END)
    client.load_verify_locations(cadata=own + end)
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
