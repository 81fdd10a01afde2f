"""A gRPC stream of Envoy: reads messages, writes replies, detects the end of the stream."""

import asyncio
from typing import Any

import grpc

from extproc.proxy.proto.ext_proc_pb2 import ProcessingRequest
from extproc.request.errors import Refusal


class Left(Exception):  # noqa: N818 - not an error
    """The stream of a request has ended."""


class Call:
    """Reads the messages of a stream one by one, because gRPC's iterator would keep the last
    message, which may be a body of many MB, until the request ends.

    Invariant: nothing that waits for gRPC is cancelled, because gRPC never frees what a cancelled
    handler waited for (https://github.com/grpc/grpc/issues/43360).
    """

    def __init__(self, context: grpc.aio.ServicerContext, reset: asyncio.Future[None]) -> None:
        """``reset`` is done when Envoy has reset the stream."""
        self._context = context
        self._reset = reset
        self._read_ahead: asyncio.Future[Any] | None = None
        self._writing = asyncio.Lock()  # gRPC takes one reply at a time

    async def read(self, unless: asyncio.Future[Refusal] | None = None) -> ProcessingRequest:
        """Returns the next message.

        Raises:
            Left: the stream ends first.
            Refusal: the result of ``unless``, if that future is done first.
            DecodeError: the bytes are not a ProcessingRequest.
            grpc.aio.BaseError: Envoy reset the stream, or the server stopped.
        """
        if unless is not None:
            await _first_of(self._reading_ahead(), unless)
            if unless.done():
                raise unless.result()
        reading, self._read_ahead = self._read_ahead, None
        raw = await (reading or self._context.read())
        if raw is grpc.aio.EOF:
            raise Left
        return ProcessingRequest.FromString(raw)

    async def write(self, reply: bytes) -> None:
        async with self._writing:
            await self._context.write(reply)

    async def wait_for(self, event: asyncio.Future[Any]) -> None:
        """Waits for the event. Reads one message ahead, to notice the end of the stream.

        Raises:
            Left: the stream ends first.
        """
        reading = self._reading_ahead()
        await _first_of(event, reading)
        if reading.done() and reading.result() is not grpc.aio.EOF:
            await _first_of(event, self._reset)  # the next call of ``read`` returns the message
        if not event.done():
            raise Left

    def _reading_ahead(self) -> asyncio.Future[Any]:
        if self._read_ahead is None:
            self._read_ahead = asyncio.ensure_future(self._context.read())
        return self._read_ahead


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
