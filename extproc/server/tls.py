"""TLS on the ports Envoy connects to. Files that change are read again, without a restart."""

import logging

import grpc

from extproc.config import TlsFiles
from extproc.server.certificates import CertificateError, Certificates, read
from extproc.watched_file import Stamp, stamp

logger = logging.getLogger(__name__)


def credentials(files: TlsFiles, section: str) -> grpc.ServerCredentials | None:
    """What a gRPC port is opened with; None: plain text.

    Args:
        files: its settings.
        section: the part of the configuration that they are in, for messages.

    Raises:
        CertificateError: a file cannot be used; the message names it.
    """
    if files.tls_cert is None:
        return None
    return _Renewed(files, section).credentials()


def open_port(server: grpc.aio.Server, address: str, files: TlsFiles, section: str) -> int:
    """Lets the server listen on ``host:port``; returns the port (of use where it was 0).

    Raises:
        CertificateError: a file of its TLS settings cannot be used.
        OSError: the address cannot be listened on; the message names the setting.
    """
    secured = credentials(files, section)
    try:
        port: int = (
            server.add_insecure_port(address)
            if secured is None
            else server.add_secure_port(address, secured)
        )
    except RuntimeError:  # its message says no more
        raise OSError(
            f"cannot listen for Envoy on {address} ({section}.listen): "
            "it is taken, or not an address of this machine"
        ) from None
    return port


class _Renewed:
    """Hands gRPC, which asks before each handshake, what is in the files by then.

    Files that cannot be used change nothing: those before them stay.
    """

    def __init__(self, files: TlsFiles, section: str) -> None:
        self._files = files
        self._section = section
        self._stamps = _stamps(files)
        self._problem = ""
        self._first = read(files, section)
        _warn(self._first)

    def credentials(self) -> grpc.ServerCredentials:
        first = _configuration(self._first)
        mutual = self._first.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(first, self._changed, mutual)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        stamps = _stamps(self._files)
        if stamps == self._stamps:
            return None
        try:
            certificates = read(self._files, self._section)
        except CertificateError as error:
            if str(error) != self._problem:
                logger.error("the old certificate stays in use", extra={"error": str(error)})
            self._problem = str(error)
            return None
        # Only now: files that could not be read are tried again, though they change no more.
        self._stamps, self._problem = stamps, ""
        logger.info("certificate renewed", extra={"file": str(self._files.tls_cert)})
        _warn(certificates)
        return _configuration(certificates)


def _configuration(files: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.chain)], files.client_ca)


def _warn(files: Certificates) -> None:
    if files.doubt:
        logger.warning("Envoy will not trust this certificate", extra={"reason": files.doubt})


def _stamps(files: TlsFiles) -> list[Stamp | None]:
    """Differ when a file was replaced or written to."""
    return [
        None if path is None else stamp(path)
        for path in (files.tls_cert, files.tls_key, files.tls_client_ca)
    ]
