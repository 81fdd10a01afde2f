"""Requests of every endpoint, streamed and whole, and a request that is refused."""

import json
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from extproc.lab.harness.stack import MODEL
from tests.e2e.client import CHAT, MESSAGES, EnvoyClient

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "The sea", "max_tokens": 8},
    "/v1/responses": {"input": "The sea"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/embeddings": {"input": ["The sea", "the sky"]},
    "/pooling": {"input": "The sea"},
    "/classify": {"input": ["The sea", "the sky"]},
    "/v1/score": {"text_1": "sea", "text_2": ["water", "stone"]},
    "/v1/rerank": {"query": "sea", "documents": ["water", "stone"]},
}
DECODING = list(BODIES)[:4]
EIGHT = {"x-simulate-output-tokens": "8"}
LARGEST_KEY = 8192  # bytes in Redis


async def test_every_redis_key_expires_and_is_small(client: EnvoyClient) -> None:
    for _ in range(8):
        await client.chat()
    async with Redis.from_url(client.stack.redis_url) as redis:
        keys = await redis.keys()
        lives = {key: await redis.pttl(key) for key in keys}
        sizes = {key: await redis.memory_usage(key, samples=0) for key in keys}
    assert {key for key in keys if b":replica:" in key}
    # pttl is -1 for a key without a life, -2 for a key that has just expired.
    assert not [key for key, life in lives.items() if life == -1]
    assert not [key for key, size in sizes.items() if size is not None and size > LARGEST_KEY]


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_is_routed(client: EnvoyClient, path: str) -> None:
    answer = await client.request("POST", path, {"model": MODEL} | BODIES[path], EIGHT)
    record = answer.decision
    assert record["endpoint"] == path
    assert record["outcome"]["served_by"] == record["replica"]
    assert record["outcome"]["completion_s"] > 0
    assert record["outcome"]["prompt_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_audio_is_routed_by_length(client: EnvoyClient, path: str) -> None:
    form = aiohttp.FormData({"model": MODEL})
    form.add_field("file", bytes(45 * 16_000), filename="speech.mp3", content_type="audio/mpeg")
    answer = await client.request("POST", path, form, EIGHT)
    record = answer.decision
    assert (record["endpoint"], record["model"], record["sequences"]) == (path, MODEL, 2)
    assert record["prompt_tokens"] == pytest.approx(45 * 25, rel=0.01)
    assert record["outcome"]["served_by"] == record["replica"]


@pytest.mark.parametrize("path", DECODING)
async def test_every_endpoint_streams(client: EnvoyClient, path: str) -> None:
    body = {"model": MODEL, "stream": True} | BODIES[path]
    answer = await client.request("POST", path, body, EIGHT)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    outcome = answer.decision["outcome"]
    assert 0 < outcome["ttft_s"] <= outcome["completion_s"]
    assert outcome["output_tokens"] == pytest.approx(8, abs=1)


async def test_refusal_of_replica_reaches_client(client: EnvoyClient) -> None:
    answer = await client.chat(n=-3, status=400)
    assert answer.decision["outcome"]["status"] == 400
    assert "error" in json.loads(answer.body)
