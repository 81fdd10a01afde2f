"""gRPC ports that Envoy connects to: TLS, and how Linux schedules gRPC's threads."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from extproc.config import MutualTlsSettings
from extproc.ground.tls import Certificates, watched


def open_port(server: grpc.aio.Server, address: str, files: MutualTlsSettings, section: str) -> int:
    """Lets the server listen on ``host:port``; returns the port (of use where it was 0).

    Raises:
        OSError: the address cannot be listened on; the message names the setting in ``section``.
    """
    secured = _credentials(files, section)
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


def _credentials(files: MutualTlsSettings, section: str) -> grpc.ServerCredentials | None:
    if files.tls_cert is None:
        return None
    renewed = watched(files, section, "Envoy", files.tls_client_ca)
    first = renewed.read()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks before each handshake."""
        certificates = renewed.if_changed()
        return None if certificates is None else _configuration(certificates)

    mutual = first.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(_configuration(first), changed, mutual)


def _configuration(files: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.chain)], files.client_ca)


@contextmanager
def patient() -> Iterator[None]:
    """Schedules threads started inside the block, and those that they start, under ``SCHED_BATCH``.

    gRPC reads sockets and completes its operations in threads of its own, several wake-ups a
    message. Linux lets a thread that wakes up interrupt the one that runs on its core; under
    ``SCHED_BATCH`` the thread waits until the running one pauses, and finds the work of several
    messages at once: a seventh less CPU a request where the router's core is busy, measured with
    ``benchmarks.overhead``. A thread that wakes up while a core is idle runs at once, as ever.
    Elsewhere than on Linux nothing changes.
    """
    patient_now = _schedule("SCHED_BATCH", instead_of="SCHED_OTHER")
    try:
        yield
    finally:
        if patient_now:
            _schedule("SCHED_OTHER", instead_of="SCHED_BATCH")


def _schedule(policy: str, instead_of: str) -> bool:
    """Tells whether the calling thread was scheduled as ``instead_of`` and now is as ``policy``."""
    if sys.platform != "linux":
        return False
    try:
        if os.sched_getscheduler(0) != getattr(os, instead_of):
            return False
        os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))
    except OSError:  # musl has no such call, a sandbox may forbid it: then all threads are alike
        return False
    return True
