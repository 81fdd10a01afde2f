"""gRPC ports that Envoy connects to: TLS, and how Linux schedules gRPC's threads."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import grpc

from extproc.config import MutualTlsSettings
from extproc.ground.address import split_address
from extproc.ground.tls import Certificates, watched


def open_port(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None, section: str
) -> int:
    """Lets the server listen on ``host:port``; returns the port (the system chooses it for port 0).

    Raises:
        OSError: the address cannot be listened on; the message names the setting in ``section``.
    """
    require_address(address, section)  # gRPC's message would not say why
    if credentials is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, credentials))


def require_address(address: str, section: str) -> None:
    """Raises what :func:`open_port` would raise now, without listening."""
    host, port = split_address(address)
    wanted = "0.0.0.0" if host == "::" else host  # gRPC takes either for both families
    try:
        # The resolver puts unusable addresses last.
        family, kind, protocol, _, first = socket.getaddrinfo(
            wanted, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(first)
    except OSError as error:
        raise OSError(
            f"cannot listen for Envoy on {address} ({section}.listen): {error.strerror}"
        ) from None


def credentials_of(settings: MutualTlsSettings, section: str) -> grpc.ServerCredentials | None:
    """Returns the credentials of a port, which follow changes of the files; None: plain text.

    Raises:
        ValueError: a TLS file cannot be used.
    """
    if settings.tls_cert is None:
        return None
    files = watched(section, "Envoy", settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    first = files.read()

    def configuration_if_changed() -> grpc.ServerCertificateConfiguration | None:
        certificates = files.if_changed()
        return None if certificates is None else _configuration(certificates)

    # gRPC calls the function before each handshake.
    return grpc.dynamic_ssl_server_credentials(
        _configuration(first), configuration_if_changed, first.client_ca is not None
    )


def _configuration(files: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.chain)], files.client_ca)


@contextmanager
def batch_scheduled_threads() -> Iterator[None]:
    """Schedules threads started inside the block, and their children, under ``SCHED_BATCH``.

    gRPC reads sockets and completes operations in threads of its own, with several wake-ups per
    message. By default, Linux lets a thread that wakes up interrupt the thread that runs on its
    core. Under ``SCHED_BATCH`` the woken thread waits until the other thread pauses, and then
    handles several messages at once: a seventh less CPU per request on a busy core
    (``benchmarks.overhead``). Nothing changes on an idle core, or on systems other than Linux.
    """
    with ExitStack() as at_exit:
        with suppress(OSError):  # musl has no such call, and a sandbox may forbid it
            if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                at_exit.callback(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0))
        yield
