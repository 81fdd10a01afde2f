"""KV cache events over ZeroMQ, as vLLM publishes them (``vllm/distributed/kv_events.py``)."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from collections.abc import Sequence as Items
from itertools import count, groupby
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from extproc.ground.address import join_address
from extproc.ground.runtime import started
from extproc.lab.simulator import tokens
from extproc.lab.simulator.steps import Sequence

_MEDIUM = "GPU"


class BlockEvents:
    """Queue of KV cache events that are not published yet."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def stored(self, sequence: Sequence, first: int, hashes: Items[int]) -> None:
        """Add events for the blocks with these hashes, one for each run of consecutive blocks."""
        new, end = set(hashes), sequence.hashes.index(hashes[-1]) + 1
        for is_new, run in groupby(range(first, end), lambda at: sequence.hashes[at] in new):
            if is_new:
                blocks = [*run]
                self._events.put_nowait(self._stored(sequence, blocks[0], blocks[-1]))

    def removed(self, hash_: int) -> None:
        self._events.put_nowait(
            {"type": "BlockRemoved", "block_hashes": [hash_], "medium": _MEDIUM}
        )

    def cleared(self) -> None:
        self._events.put_nowait({"type": "AllBlocksCleared"})

    async def take(self) -> list[dict[str, Any]]:
        """Wait for an event, and return all events that are queued then."""
        taken = [await self._events.get()]
        while not self._events.empty():
            taken.append(self._events.get_nowait())
        return taken

    def _stored(self, sequence: Sequence, first: int, last: int) -> dict[str, Any]:
        block_bytes = self._block_size * tokens.BYTES_PER_TOKEN
        content = sequence.content[first * block_bytes : (last + 1) * block_bytes]
        return {
            "type": "BlockStored",
            "block_hashes": [*sequence.hashes[first : last + 1]],
            "parent_block_hash": sequence.hashes[first - 1] if first else None,
            "token_ids": tokens.token_ids(content),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": _MEDIUM,
            "lora_name": sequence.adapter or None,
        }


_BUFFERED_BATCHES = 10_000  # last batches for replays: the default of vLLM's `buffer_steps`
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


async def publishing(
    events: BlockEvents, host: str, port: int, replay_port: int
) -> AsyncIterator[None]:
    """Publish numbered batches of events, and replay the last batches for clients that ask.

    Raises:
        OSError: a port cannot be bound.
    """
    buffered: deque[tuple[bytes, bytes]] = deque(maxlen=_BUFFERED_BATCHES)
    with (
        zmq.asyncio.Context() as context,
        _listening(context, zmq.PUB, host, port) as publisher,
        _listening(context, zmq.ROUTER, host, replay_port) as replays,
    ):
        async with started(_publish(events, publisher, buffered), _replay(replays, buffered)):
            yield


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
    events: BlockEvents, publisher: zmq.asyncio.Socket, buffered: deque[tuple[bytes, bytes]]
) -> None:
    for number in count():
        batch = time.time(), await events.take(), 0
        buffered.append((number.to_bytes(_NUMBER_BYTES, "big"), msgspec.msgpack.encode(batch)))
        await publisher.send_multipart((b"", *buffered[-1]))


async def _replay(replays: zmq.asyncio.Socket, buffered: deque[tuple[bytes, bytes]]) -> None:
    while True:
        client, *_, start = await replays.recv_multipart()
        for number, batch in [*buffered]:
            if number >= start:
                await replays.send_multipart((client, b"", b"", number, batch))
        await replays.send_multipart((client, b"", b"", _END, b""))
