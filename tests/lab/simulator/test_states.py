"""Frozen gauges, sleep and full queues of a simulated replica, as measured on vLLM."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession

from extproc.lab.simulator.metrics import LIMITS
from extproc.lab.simulator.replica import Replica
from tests.lab.simulator.conftest import CHAT, SETTINGS, chat, get, reply
from tests.lab.simulator.test_metrics import values
from tests.waiting import until

LONG = chat(max_tokens=4000, ignore_eos=True)
ENDPOINTS = {
    CHAT: LONG,
    "/v1/completions": {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True},
    "/v1/messages": LONG,
    "/v1/responses": {"input": "hello", "max_output_tokens": 4000, "ignore_eos": True},
}


@asynccontextmanager
async def running(
    client: ClientSession, replica: Replica, *requests: tuple[str, dict[str, Any]]
) -> AsyncIterator[list[asyncio.Task[dict[str, Any]]]]:
    tasks = [asyncio.create_task(reply(client, *request)) for request in requests]
    await until(lambda: replica.engine.running == len(requests))
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def gauges(client: ClientSession) -> dict[str, float]:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    page = await values(client)
    return {name: page[name] for name in names}


@pytest.mark.parametrize(
    ("level", "state"), [(0, ""), (1, "weights_offloaded"), (2, "discard_all")]
)
async def test_sleeping_engine_is_healthy_and_answers_after_it_wakes(
    client: ClientSession, level: int, state: str
) -> None:
    async def sleep_states() -> set[str]:
        prefix, page = "engine_sleep_state.", await values(client)
        return {
            name.removeprefix(prefix) for name in page if name.startswith(prefix) and page[name]
        }

    assert await sleep_states() == {"awake"}
    prompt = chat("word " * 100, max_tokens=1)
    await reply(client, CHAT, prompt)
    assert await reply(client, f"/sleep?level={level}", {}) == {
        "status": "sleeping",
        "level": level,
    }
    assert await sleep_states() == {state} - {""}
    waiting = asyncio.create_task(reply(client, CHAT, prompt))
    assert await get(client, "/is_sleeping") == {"is_sleeping": True}
    async with client.get("/health") as response:
        assert response.status == 200
    while not await get(client, "/simulate/requests"):
        pass
    assert set((await gauges(client)).values()) == {0.0}, "gauges do not change without steps"
    assert not waiting.done()
    assert await reply(client, "/wake_up", {}) == {"status": "awake", "tags": None}
    cached = (await waiting)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (cached == 0) == (level > 0)
    assert await sleep_states() == {"awake"}
    assert await get(client, "/is_sleeping") == {"is_sleeping": False}


async def test_sleep_aborts_running_requests_with_partial_answers(
    client: ClientSession, replica: Replica
) -> None:
    async with running(client, replica, *ENDPOINTS.items()) as tasks:
        async with client.post(CHAT, json=LONG | {"stream": True}) as stream:
            assert await stream.content.readany()
            await reply(client, "/sleep", {})
            end = (await stream.text()).split("\n\n")
        chat_answer, completion, message, response = await asyncio.gather(*tasks)
    assert (chat_answer["choices"][0]["finish_reason"], message["stop_reason"]) == ("abort", None)
    assert completion["choices"][0]["finish_reason"] == "abort"
    assert response["status"] == "completed"
    assert '"finish_reason":"abort"' in end[-3]
    assert end[-2] == "data: [DONE]"
    assert 0 < chat_answer["usage"]["completion_tokens"] < 4000
    assert (replica.engine.running, replica.engine.waiting) == (0, 0)


ADVICE = "Please try again later or on a different instance."


@pytest.mark.parametrize(
    ("replica", "limit", "message"),
    [
        (replace(SETTINGS, max_num_queued_reqs=2), "max_num_queued_reqs",
         f"The engine is currently busy and cannot accept new requests. {ADVICE}"),
        (replace(SETTINGS, max_num_queued_tokens=1), "max_num_queued_tokens",
         f"The engine has reached its prefill token backlog limit. {ADVICE}"),
    ],
    indirect=["replica"],
    ids=["requests", "tokens"],
)  # fmt: skip
async def test_full_queue_answers_503_and_is_healthy(
    client: ClientSession, replica: Replica, limit: str, message: str
) -> None:
    short = chat(max_tokens=1)
    await reply(client, "/sleep?level=0", {})
    admitted = asyncio.create_task(reply(client, CHAT, short | {"n": 2}))
    await until(lambda: replica.live.unfinished == 2)
    error = {"type": "Service Unavailable", "message": message}
    for path, body, answer in (
        (CHAT, short | {"stream": True}, {"error": error | {"param": None, "code": 503}}),
        ("/v1/messages", short, {"type": "error", "error": error}),
    ):
        async with client.post(path, json=body) as response:
            assert (response.status, await response.json()) == (503, answer)
            assert "retry-after" not in response.headers
    async with client.get("/health") as response:
        assert response.status == 200
    page = await values(client)
    refused = {name: page[f"admission_rejections_total.{name}"] for name in LIMITS}
    assert refused == {**dict.fromkeys(LIMITS, 0), limit: 2}
    await reply(client, "/wake_up", {})
    await admitted
    await reply(client, CHAT, short)
