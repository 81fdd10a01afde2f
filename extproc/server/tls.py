"""TLS on the port Envoy connects to. Files that change are read again, without a restart."""

import logging
from pathlib import Path

import grpc

from extproc.config import ServeSettings
from extproc.server.certificates import CertificateError, Certificates, read

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]


def credentials(serve: ServeSettings) -> grpc.ServerCredentials | None:
    """What the gRPC port is opened with; None: plain text.

    Raises:
        CertificateError: a file cannot be used; the message names it.
    """
    if serve.tls_cert is None:
        return None
    return _Renewed(serve).credentials()


class _Renewed:
    """Hands gRPC, which asks before each handshake, what is in the files by then.

    Files that cannot be used change nothing: those before them stay.
    """

    def __init__(self, serve: ServeSettings) -> None:
        self._serve = serve
        self._stamps = _stamps(serve)
        self._first = read(serve)
        _warn(self._first)

    def credentials(self) -> grpc.ServerCredentials:
        first = _configuration(self._first)
        mutual = self._first.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(first, self._changed, mutual)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        stamps = _stamps(self._serve)
        if stamps == self._stamps:
            return None
        self._stamps = stamps
        try:
            certificates = read(self._serve)
        except CertificateError as error:
            logger.error("the old certificate stays in use", extra={"error": str(error)})
            return None
        logger.info("certificate renewed", extra={"file": str(self._serve.tls_cert)})
        _warn(certificates)
        return _configuration(certificates)


def _configuration(files: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.chain)], files.client_ca)


def _warn(files: Certificates) -> None:
    if files.doubt:
        logger.warning("Envoy will not trust this router", extra={"reason": files.doubt})


def _stamps(serve: ServeSettings) -> list[_Stamp | None]:
    """Differ when a file was replaced or written to."""
    return [
        None if path is None else _stamp(path)
        for path in (serve.tls_cert, serve.tls_key, serve.tls_client_ca)
    ]


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
