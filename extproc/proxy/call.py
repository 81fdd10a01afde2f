"""A gRPC stream of Envoy: its messages, and the end that it may come to at any time."""

import asyncio
from typing import Any

import grpc

from extproc.proxy.proto.ext_proc_pb2 import ProcessingRequest
from extproc.request.errors import Refusal


class Left(Exception):  # noqa: N818 - no fault of anybody
    """The stream has ended."""


class Call:
    """Reads messages one by one: gRPC's iterator of them keeps the last one, and that may be a body
    of many MB for as long as the answer takes.

    Nothing that waits for gRPC is cancelled (https://github.com/grpc/grpc/issues/43360): gRPC never
    frees what a cancelled handler was waiting for.
    """

    def __init__(self, context: grpc.aio.ServicerContext, reset: asyncio.Future[None]) -> None:
        """``reset`` is done when Envoy has reset the stream."""
        self._context = context
        self._reset = reset
        self._reading: asyncio.Future[Any] | None = None  # a message ahead
        self._writing = asyncio.Lock()  # gRPC takes one reply at a time

    async def read(self, unless: asyncio.Future[Refusal] | None = None) -> ProcessingRequest:
        """The next message.

        Raises:
            Left: the stream ends before it.
            Refusal: the result of ``unless``, if that comes first.
            DecodeError: it is none.
            grpc.aio.BaseError: Envoy reset the stream, or the server stopped.
        """
        if unless is not None:
            self._reading = self._reading or asyncio.ensure_future(self._context.read())
            await _first_of(self._reading, unless)
            if unless.done():
                raise unless.result()
        reading, self._reading = self._reading, None
        raw = await (reading or self._context.read())
        if raw is grpc.aio.EOF:
            raise Left
        return ProcessingRequest.FromString(raw)

    async def write(self, reply: bytes) -> None:
        async with self._writing:
            await self._context.write(reply)

    async def unless_left(self, event: asyncio.Future[Any]) -> None:
        """Waits for the event.

        Raises:
            Left: the stream ends before it.
        """
        reading = self._reading = self._reading or asyncio.ensure_future(self._context.read())
        await _first_of(event, reading)
        if reading.done() and reading.result() is not grpc.aio.EOF:
            await _first_of(event, self._reset)  # the message has its turn then
        if not event.done():
            raise Left


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
