"""Step times are learned from the counters of running replicas."""

import asyncio

import pytest

from extproc.predict.hardware import PROFILES
from tests.e2e.client import Client
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

FAST = PROFILES["llama-8b-h100"].step


async def test_a_throttled_replica_is_seen_and_avoided(client: Client, stack: Stack) -> None:
    await client.simulate("fast-1", slow=5.0)
    ended = asyncio.Event()

    async def load() -> None:
        url = f"http://{stack.address('fast-1')}/v1/completions"
        body = {"model": "llama-8b", "prompt": "the sea " * 200, "max_tokens": 100}
        while not ended.is_set():
            await client.post(url, body)

    loads = [asyncio.create_task(load()) for _ in range(3)]

    async def seen() -> bool:
        learned = (await client.replica("fast-1"))["learned"]
        return bool(learned and learned["c0"] > 4 * FAST.c0)

    try:
        await client.until(seen, seconds=30)
        answers = [await client.chat(tokens=20) for _ in range(5)]
    finally:
        ended.set()
        await asyncio.gather(*loads)
    assert {answer.decision["replica_name"] for answer in answers} == {"fast-2"}
