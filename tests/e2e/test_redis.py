"""What a running system leaves in Redis."""

import pytest
from redis.asyncio import Redis

from tests.e2e.client import Client
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

LARGEST = 8192
"""Bytes that any key takes."""


async def test_every_key_ends_by_itself_and_is_small(stack: Stack, client: Client) -> None:
    for _ in range(8):
        assert (await client.chat()).status == 200
    async with Redis.from_url(stack.redis_url) as redis:
        keys = await redis.keys()
        lives = {key: await redis.pttl(key) for key in keys}
        sizes = {key: await redis.memory_usage(key, samples=0) for key in keys}
    assert {key for key in keys if b":replica:" in key}
    # One that just ended has none either, which pttl tells apart.
    assert not [key for key, life in lives.items() if life == -1]
    assert not [key for key, size in sizes.items() if size is not None and size > LARGEST]
