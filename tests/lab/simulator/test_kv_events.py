"""KV events of a simulated replica, over real sockets."""

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


class Told:
    """A replica with events, and who listens."""

    def __init__(self, client: ClientSession, heard: Any, asked: Any) -> None:
        self._client = client
        self._heard = heard
        self._asked = asked

    async def complete(self, ids: list[int], tokens: int = 1) -> None:
        body = {"prompt": ids, "max_tokens": tokens, "ignore_eos": True}
        await reply(self._client, "/v1/completions", body)

    async def sleep(self) -> None:
        await reply(self._client, "/sleep", {})

    async def batch(self) -> tuple[int, list[dict[str, Any]]]:
        topic, number, payload = await self._heard.recv_multipart()
        assert topic == b""
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        return int.from_bytes(number, "big"), events

    async def replay(self, start: int) -> list[int]:
        await self._asked.send_multipart((b"", start.to_bytes(8, "big")))
        numbers = []
        while True:
            *_, number, _ = await self._asked.recv_multipart()
            numbers.append(int.from_bytes(number, "big", signed=True))
            if numbers[-1] == -1:
                return numbers


async def connect(socket: Any, port: int) -> None:
    """Returns when the other side has answered."""
    with socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED) as connected:
        socket.connect(f"tcp://127.0.0.1:{port}")
        await connected.recv_multipart()
        socket.disable_monitor()


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    ports = (free_port(), free_port())
    settings = replace(SETTINGS, max_model_len=160, kv_tokens=160, kv_events_ports=ports)
    runner, port, _ = await start(Replica(settings), "127.0.0.1", 0)
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as heard:
        heard.subscribe(b"")
        heard.rcvtimeo = round(PATIENCE_S * 1000)
        await connect(heard, ports[0])
        with context.socket(zmq.SUB) as second:
            # The publisher reads in turn: once it has met this one, it knows what the first wants.
            await connect(second, ports[0])
        with context.socket(zmq.DEALER) as asked:
            asked.rcvtimeo = round(PATIENCE_S * 1000)
            asked.connect(f"tcp://127.0.0.1:{ports[1]}")
            async with ClientSession(f"http://127.0.0.1:{port}") as client:
                yield Told(client, heard, asked)
    await runner.cleanup()


async def test_stored_blocks_say_what_is_in_them_and_before_them(told: Told) -> None:
    first = list(range(40))
    await told.complete(first)
    number, [stored] = await told.batch()
    assert (number, stored["type"], stored["block_size"]) == (0, "BlockStored", BLOCK)
    assert stored["token_ids"] == first[:32]
    assert stored["parent_block_hash"] is None
    assert len(stored["block_hashes"]) == 2
    await told.complete([*first, *range(100, 124)])
    number, [more] = await told.batch()
    assert number == 1
    assert more["parent_block_hash"] == stored["block_hashes"][-1]
    assert more["token_ids"] == [*range(32, 40), *range(100, 124)]


async def test_evicted_blocks_are_told_and_the_last_batches_replayed(told: Told) -> None:
    await told.complete([1] * 100)
    _, [stored] = await told.batch()
    await told.complete([2] * 100)
    _, events = await told.batch()
    removed = [hash_ for event in events[:-1] for hash_ in event["block_hashes"]]
    assert [event["type"] for event in events] == ["BlockRemoved"] * len(removed) + ["BlockStored"]
    assert removed == stored["block_hashes"][::-1][: len(removed)]
    assert await told.replay(0) == [0, 1, -1]
    assert await told.replay(1) == [1, -1]


async def test_sleep_clears_all_blocks(told: Told) -> None:
    await told.complete([1] * 40)
    await told.batch()
    await told.sleep()
    assert await told.batch() == (1, [{"type": "AllBlocksCleared"}])


async def test_a_port_that_is_taken_is_told() -> None:
    ports = (free_port(), free_port())
    settings = replace(SETTINGS, kv_events_ports=ports)
    runner, _, _ = await start(Replica(settings), "127.0.0.1", 0)
    with pytest.raises(OSError, match=f"port {ports[0]} for KV events"):
        await start(Replica(settings), "127.0.0.1", 0)
    await runner.cleanup()
