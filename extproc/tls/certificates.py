"""The files that TLS needs: read, and tried before they are used."""

import logging
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from extproc.config import CertificateFiles, TlsFiles
from extproc.ground.files import Watched, read_certificates, read_file

logger = logging.getLogger(__name__)

_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Certificates:
    """What was in the files, in PEM."""

    chain: bytes
    """The certificate to show, and those between it and its authority."""
    key: bytes
    client_ca: bytes | None
    """Authorities of those who may connect; None: anybody may."""
    doubt: str
    """Why peers will not take the certificate (it has expired, say); empty where they will."""
    context: ssl.SSLContext
    """With certificate and key, for a port of its own."""


def read(files: CertificateFiles, section: str) -> Certificates:
    """Reads and tries the files of a section of the configuration that has TLS."""
    assert files.tls_cert is not None
    assert files.tls_key is not None
    chain = read_certificates(f"{section}.tls_cert", files.tls_cert)
    key = read_file(f"{section}.tls_key", files.tls_key)
    client_ca = None
    if authorities := _authorities(files):
        client_ca = read_certificates(f"{section}.tls_client_ca", authorities)
    context = _pair(files.tls_cert, files.tls_key, section)
    doubt = _shake_hands(context, trusting(files.tls_cert))
    return Certificates(chain, key, client_ca, doubt and f"{files.tls_cert}: {doubt}", context)


def watched(files: CertificateFiles, section: str, peers: str) -> Watched[Certificates]:
    """The same, again when a file has changed, to be asked before each handshake; what ``peers``
    have against the certificate is logged."""

    def tried() -> Certificates:
        found = read(files, section)
        if found.doubt:
            text = f"{peers} will not trust this certificate"
            logger.warning(text, extra={"reason": found.doubt})
        return found

    named = (files.tls_cert, files.tls_key, _authorities(files))
    return Watched("certificate", tried, *filter(None, named))


def _authorities(files: CertificateFiles) -> Path | None:
    """Of those that must be shown; None: nothing must."""
    return files.tls_client_ca if isinstance(files, TlsFiles) else None


def _pair(cert: Path, key: Path, section: str) -> ssl.SSLContext:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(cert, key, password="")  # gRPC takes no password
    except ssl.SSLError as error:
        raise ValueError(f"{section}.tls_key: {key}: {_reason(error, cert)}") from None
    return server


def trusting(certificate: Path) -> ssl.SSLContext:
    """What a client connects with that trusts this very certificate, whoever signed it and
    whatever name it is for, and nothing else; of a file with several the first, which is a
    server's own."""
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


def _reason(error: ssl.SSLError, cert: Path) -> str:
    match error.reason:
        case "KEY_VALUES_MISMATCH" | "KEY_TYPE_MISMATCH":
            return f"is not the key of the certificate in {cert}"
        case None:
            return "holds no key (PEM), or one with a password"
        case reason:
            return f"cannot be used with {cert}: {reason}"


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """Why the client hangs up on the server, in OpenSSL's words; empty where it does not."""
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
