"""HTTP server of a simulated replica: answers, disconnects and faults."""

import asyncio
from array import array
from base64 import b64decode
from typing import Any

import pytest
from aiohttp import ClientSession

from extproc.lab.simulator.replica import Replica
from tests.lab.simulator.conftest import CHAT, chat, reply
from tests.waiting import PATIENCE_S, until


async def test_every_response_names_its_replica(client: ClientSession, url: str) -> None:
    for path in ("/health", "/v1/models", "/v1/nothing"):
        async with client.get(path) as response:
            assert response.headers["x-served-by"] == url.removeprefix("http://")


@pytest.mark.parametrize(
    ("path", "body", "header", "tokens"),
    [
        (CHAT, chat(max_completion_tokens=3, max_tokens=5), 99, 3),
        (CHAT, chat(max_tokens=5), 99, 5),
        (CHAT, chat(), 99, 99),
        (CHAT, chat(max_tokens=7, ignore_eos=True), None, 7),
        ("/v1/completions", {"prompt": "hello", "ignore_eos": True}, None, 16),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}, None, 20),
        ("/v1/completions", {"prompt": "hello", "max_tokens": None, "ignore_eos": True}, None, 16),
        ("/v1/completions", {"prompt": [7] * 4090, "ignore_eos": True}, None, 6),
    ],
)
async def test_output_bounds_are_those_of_vllm(
    client: ClientSession, path: str, body: dict[str, Any], header: int | None, tokens: int
) -> None:
    assert (await reply(client, path, body, header))["usage"]["completion_tokens"] == tokens


async def test_embedding_is_the_same_in_base64_and_in_numbers(client: ClientSession) -> None:
    packed, plain = [
        (await reply(client, "/v1/embeddings", {"input": "hello", "encoding_format": encoding}))
        for encoding in ("base64", "float")
    ]
    numbers = array("f", b64decode(packed["data"][0]["embedding"]))
    assert list(numbers) == pytest.approx(plain["data"][0]["embedding"])


async def test_min_tokens_is_respected(client: ClientSession) -> None:
    answer = await reply(client, CHAT, chat(min_tokens=300))
    assert answer["usage"]["completion_tokens"] >= 300


async def test_next_turn_of_a_conversation_hits_the_cache(client: ClientSession) -> None:
    messages = [{"role": "user", "content": "tell me a long story " * 40}]
    first = await reply(client, CHAT, {"messages": messages}, 100)
    messages.append(first["choices"][0]["message"])
    messages.append({"role": "user", "content": "go on"})
    second = await reply(client, CHAT, {"messages": messages}, 1)
    total = first["usage"]["total_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert total - 32 <= cached <= total


async def test_responses_stream_opens_before_the_first_token(
    client: ClientSession, replica: Replica
) -> None:
    replica.engine.slow_down(1000)
    body = {"input": "hello", "stream": True}
    async with asyncio.timeout(PATIENCE_S), client.post("/v1/responses", json=body) as response:
        opening = b""
        while opening.count(b"\n\n") < 2:
            opening += await response.content.readany()
        assert b"event: response.created" in opening
        assert b"event: response.in_progress" in opening
        assert not replica.engine.counters.first_tokens


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnected_client_frees_its_blocks(
    client: ClientSession, replica: Replica, stream: bool
) -> None:
    body = chat(stream=stream, ignore_eos=True, max_tokens=4000)
    replica.engine.slow_down(20.0)
    request = asyncio.ensure_future(client.post(CHAT, json=body))
    await until(lambda: replica.engine.running)
    if stream:
        (await request).close()
    else:
        request.cancel()
    await until(lambda: not replica.engine.running)
    assert replica.engine.kv_usage == 0
    assert replica.engine.counters.finished.total() == 0


async def test_slow_fault_sets_the_factor_of_the_engine(
    client: ClientSession, replica: Replica
) -> None:
    faults = {
        "hang": False,
        "fail": 0,
        "reset": False,
        "freezing_gauges": False,
        "metrics_seconds": [0, 0],
    }
    assert await reply(client, "/simulate", {"slow": 3}) == {"slow": 3} | faults
    assert replica.engine.step_model == replica.engine.profile.step.slowed(3)


async def test_metrics_fault_delays_only_the_metrics_page(client: ClientSession) -> None:
    await reply(client, "/simulate", {"metrics_seconds": [60, 60]})
    metrics = asyncio.ensure_future(client.get("/metrics"))
    await reply(client, CHAT, chat(max_tokens=1))
    async with client.get("/health") as response:
        assert response.status == 200
    assert not metrics.done()
    metrics.cancel()
    await reply(client, "/simulate", {"metrics_seconds": [0.01, 0.02]})
    async with client.get("/metrics") as response:
        assert response.status == 200
