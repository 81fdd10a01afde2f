"""KV events of a simulated replica, read from its sockets."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import ClientSession

from extproc.lab.harness.processes import free_port
from extproc.lab.simulator.replica import Replica
from extproc.lab.simulator.server import start
from tests.lab.simulator.conftest import SETTINGS, reply
from tests.waiting import PATIENCE_S

BLOCK = 16


class EventReader:
    """Client of a replica, with sockets for its events and their replay."""

    def __init__(self, client: ClientSession, events: Any, replays: Any) -> None:
        self._client = client
        self._events = events
        self._replays = replays

    async def complete(self, ids: list[int], tokens: int = 1) -> None:
        body = {"prompt": ids, "max_tokens": tokens, "ignore_eos": True}
        await reply(self._client, "/v1/completions", body)

    async def sleep(self) -> None:
        await reply(self._client, "/sleep", {})

    async def batch(self) -> tuple[int, list[dict[str, Any]]]:
        topic, number, payload = await self._events.recv_multipart()
        assert topic == b""
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        return int.from_bytes(number, "big"), events

    async def replay(self, start: int) -> list[int]:
        await self._replays.send_multipart((b"", start.to_bytes(8, "big")))
        numbers = []
        while True:
            *_, number, _ = await self._replays.recv_multipart()
            numbers.append(int.from_bytes(number, "big", signed=True))
            if numbers[-1] == -1:
                return numbers


async def connect(socket: Any, port: int) -> None:
    """Connect, and wait for the handshake."""
    with socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED) as connected:
        socket.connect(f"tcp://127.0.0.1:{port}")
        await connected.recv_multipart()
        socket.disable_monitor()


@pytest.fixture
async def reader() -> AsyncIterator[EventReader]:
    ports = (free_port(), free_port())
    settings = replace(SETTINGS, max_model_len=160, kv_tokens=160, kv_events_ports=ports)
    runner, port, _ = await start(Replica(settings), "127.0.0.1", 0)
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as events:
        events.subscribe(b"")
        events.rcvtimeo = round(PATIENCE_S * 1000)
        await connect(events, ports[0])
        with context.socket(zmq.SUB) as second:
            # The publisher handles connections in order: after this handshake it has read the first
            # subscription.
            await connect(second, ports[0])
        with context.socket(zmq.DEALER) as replays:
            replays.rcvtimeo = round(PATIENCE_S * 1000)
            replays.connect(f"tcp://127.0.0.1:{ports[1]}")
            async with ClientSession(f"http://127.0.0.1:{port}") as client:
                yield EventReader(client, events, replays)
    await runner.cleanup()


async def test_stored_event_has_tokens_and_parent_of_its_blocks(reader: EventReader) -> None:
    first = list(range(40))
    await reader.complete(first)
    number, [stored] = await reader.batch()
    assert (number, stored["type"], stored["block_size"]) == (0, "BlockStored", BLOCK)
    assert stored["token_ids"] == first[:32]
    assert stored["parent_block_hash"] is None
    assert len(stored["block_hashes"]) == 2
    await reader.complete([*first, *range(100, 124)])
    number, [more] = await reader.batch()
    assert number == 1
    assert more["parent_block_hash"] == stored["block_hashes"][-1]
    assert more["token_ids"] == [*range(32, 40), *range(100, 124)]


async def test_evicted_blocks_are_published_and_batches_replayed(reader: EventReader) -> None:
    await reader.complete([1] * 100)
    _, [stored] = await reader.batch()
    await reader.complete([2] * 100)
    _, events = await reader.batch()
    removed = [hash_ for event in events[:-1] for hash_ in event["block_hashes"]]
    assert [event["type"] for event in events] == ["BlockRemoved"] * len(removed) + ["BlockStored"]
    assert removed == stored["block_hashes"][::-1][: len(removed)]
    assert await reader.replay(0) == [0, 1, -1]
    assert await reader.replay(1) == [1, -1]


async def test_sleep_publishes_that_all_blocks_are_cleared(reader: EventReader) -> None:
    await reader.complete([1] * 40)
    await reader.batch()
    await reader.sleep()
    assert await reader.batch() == (1, [{"type": "AllBlocksCleared"}])


async def test_taken_events_port_is_an_error() -> None:
    ports = (free_port(), free_port())
    settings = replace(SETTINGS, kv_events_ports=ports)
    runner, _, _ = await start(Replica(settings), "127.0.0.1", 0)
    with pytest.raises(OSError, match=f"port {ports[0]} for KV events"):
        await start(Replica(settings), "127.0.0.1", 0)
    await runner.cleanup()
