"""TLS on the ports Envoy connects to."""

import grpc

from extproc.config import TlsFiles
from extproc.ground.tls import Certificates, watched


def credentials(files: TlsFiles, section: str) -> grpc.ServerCredentials | None:
    """What a gRPC port is opened with; None: plain text. Messages name the section of the
    configuration."""
    if files.tls_cert is None:
        return None
    renewed = watched(files, section, "Envoy", files.tls_client_ca)
    first = renewed.read()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks before each handshake."""
        certificates = renewed.news()
        return None if certificates is None else _configuration(certificates)

    mutual = first.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(_configuration(first), changed, mutual)


def open_port(server: grpc.aio.Server, address: str, files: TlsFiles, section: str) -> int:
    """Lets the server listen on ``host:port``; returns the port (of use where it was 0).

    Raises:
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


def _configuration(files: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.chain)], files.client_ca)
