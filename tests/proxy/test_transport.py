"""Memory and threads of gRPC: requests leave no memory behind."""

import ctypes
import gc
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from errno import EAFNOSUPPORT, ENOSYS
from threading import Event, Thread

import pytest
from envoy_data_plane.envoy.service.ext_proc.v3 import HttpBody, ProcessingRequest
from grpclib.client import Channel, Stream
from grpclib.const import Cardinality
from grpclib.encoding.base import CodecBase

from extproc.proxy import messages
from extproc.proxy.service import SERVICE, GrpcServer
from extproc.proxy.services import Services
from extproc.proxy.transport import batch_scheduled_threads, require_address

BATCH = 96  # bytes that gRPC allocates for each batch of operations


class _InUse(ctypes.Structure):
    """``struct mallinfo2``."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    )


def in_use() -> int:
    """Bytes allocated by C's ``malloc``, which does not serve Python's small objects."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("only glibc reports allocated bytes")
    mallinfo.restype = _InUse
    gc.collect()
    return int(mallinfo().uordblks)


async def left_by(times: int, ask: Callable[[], Awaitable[None]]) -> float:
    """Bytes that each call leaves behind, after ``times`` calls that fill caches."""
    for _ in range(times):
        await ask()
    before = in_use()
    for _ in range(times):
        await ask()
    return (in_use() - before) / times


class _Bytes(CodecBase):
    """Codec that changes nothing, for grpclib: its client in Python allocates no memory of gRPC."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: object) -> bytes:
        return message

    def decode(self, data: bytes, message_type: object) -> bytes:
        return data


async def test_reply_leaks_no_memory() -> None:
    number = 0

    async def reply() -> None:
        nonlocal number
        number += 1
        messages.send_to("request_body", f"10.0.{number // 200 % 200}.{number % 200}:8000")

    assert await left_by(50_000, reply) < 4


async def left_by_streams(port: int, reset: bool) -> float:
    """Bytes that each stream, perhaps reset by the client, leaves behind in client and server."""
    raw = bytes(ProcessingRequest(request_body=HttpBody(body=b"{}", end_of_stream=True)))
    channel = Channel("127.0.0.1", port, codec=_Bytes())

    async def ask() -> None:
        stream: Stream[bytes, bytes] = channel.request(
            f"/{SERVICE}/Process", Cardinality.STREAM_STREAM, bytes, bytes
        )
        async with stream:
            await stream.send_message(raw)
            assert await stream.recv_message() is not None
            await stream.end()
            await (stream.cancel() if reset else stream.recv_trailing_metadata())

    try:
        return await left_by(500, ask)
    finally:
        channel.close()


@pytest.mark.slow
async def test_reset_stream_leaks_no_memory(services: Services) -> None:
    """Envoy resets each stream as soon as it has closed it."""
    server = GrpcServer(services)
    port = await server.start("127.0.0.1:0")
    try:
        others = await left_by_streams(port, reset=False)
        assert await left_by_streams(port, reset=True) < others + BATCH / 2
    finally:
        await server.stop(0)


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs SCHED_BATCH")


def test_all_addresses_need_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a kernel without IPv6, gRPC listens on IPv4."""
    create = socket.socket

    def of_kernel(family: int, *kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(EAFNOSUPPORT, "Address family not supported by protocol")
        return create(family, *kind)

    monkeypatch.setattr("extproc.proxy.transport.socket.socket", of_kernel)
    require_address("[::]:0", "serve")
    with pytest.raises(OSError, match="Address family not supported"):
        require_address("[::1]:0", "serve")


@linux
def test_batch_scheduling_covers_only_new_threads() -> None:
    ended = Event()
    policies = []

    def run() -> None:
        child = Thread(target=lambda: policies.append(os.sched_getscheduler(0)))
        child.start()
        child.join()
        ended.wait()
        policies.append(os.sched_getscheduler(0))

    with batch_scheduled_threads():
        inside = Thread(target=run)
        inside.start()
    try:
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    finally:
        ended.set()
        inside.join()
    assert policies == [os.SCHED_BATCH, os.SCHED_BATCH], "its own child, and itself"


@linux
def test_batch_scheduling_ends_after_error() -> None:
    with pytest.raises(ValueError, match="no"), batch_scheduled_threads():
        raise ValueError("no")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@linux
def test_batch_scheduling_tolerates_missing_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With musl as C library, the call always fails."""

    def refuse(_: int) -> int:
        raise OSError(ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "sched_getscheduler", refuse)
    with batch_scheduled_threads():
        pass
