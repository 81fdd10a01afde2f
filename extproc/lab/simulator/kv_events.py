"""Tells over ZMQ of a replica's KV blocks, as vLLM does (``vllm/distributed/kv_events.py``)."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from itertools import count

import msgspec
import zmq
import zmq.asyncio

from extproc.ground.address import join_address
from extproc.lab.simulator.block_events import BlockEvents

_KEPT = 10_000
"""Batches that can be replayed, as vLLM's ``buffer_steps``."""
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


async def publishing(
    events: BlockEvents, host: str, port: int, replay_port: int
) -> AsyncIterator[None]:
    """Publish events, numbered batch by batch, and replay the last ones, until closed.

    Raises:
        OSError: a port cannot be listened on.
    """
    kept: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT)
    with (
        zmq.asyncio.Context() as context,
        _listening(context, zmq.PUB, host, port) as publisher,
        _listening(context, zmq.ROUTER, host, replay_port) as asked,
    ):
        work = asyncio.gather(_publish(events, publisher, kept), _replay(asked, kept))
        yield
        work.cancel()
        await asyncio.wait([work])


def _listening(context: zmq.asyncio.Context, kind: int, host: str, port: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    try:
        socket.bind(f"tcp://{join_address(host, port)}")
    except zmq.ZMQError as error:
        socket.close()
        raise OSError(error.errno, f"port {port} for KV events: {error.strerror}") from None
    return socket


async def _publish(
    events: BlockEvents, publisher: zmq.asyncio.Socket, kept: deque[tuple[bytes, bytes]]
) -> None:
    for number in count():
        batch = time.time(), await events.take(), 0
        kept.append((number.to_bytes(_NUMBER_BYTES, "big"), msgspec.msgpack.encode(batch)))
        await publisher.send_multipart((b"", *kept[-1]))


async def _replay(asked: zmq.asyncio.Socket, kept: deque[tuple[bytes, bytes]]) -> None:
    while True:
        asker, *_, start = await asked.recv_multipart()
        for number, batch in [*kept]:
            if number >= start:
                await asked.send_multipart((asker, b"", b"", number, batch))
        await asked.send_multipart((asker, b"", b"", _END, b""))
