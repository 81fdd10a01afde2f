"""The router's usage reader agrees with the counters of the replica."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession

from extproc.lab.simulator.answers import GENERATING
from extproc.lab.simulator.replica import Replica
from extproc.request.endpoint import Endpoint
from extproc.request.usage import ReportedUsage, UsageReader
from tests.lab.simulator.conftest import SETTINGS

TEXT = "a prompt of several blocks " * 20
MESSAGES = [{"role": "user", "content": TEXT}]
WITH_USAGE = {"stream_options": {"include_usage": True}}

BODIES: dict[str, dict[str, Any]] = {
    Endpoint.CHAT: {"messages": MESSAGES, "max_tokens": 5},
    Endpoint.COMPLETIONS: {"prompt": [TEXT, "another"], "max_tokens": 5},
    Endpoint.RESPONSES: {"input": TEXT, "max_output_tokens": 5},
    Endpoint.MESSAGES: {"messages": MESSAGES, "max_tokens": 5},
    Endpoint.EMBEDDINGS: {"input": [TEXT, "another"]},
    Endpoint.POOLING: {"input": [TEXT, "another"]},
    Endpoint.CLASSIFY: {"input": [TEXT, "another"]},
    Endpoint.SCORE: {"text_1": TEXT, "text_2": ["one", "another"]},
    Endpoint.RERANK: {"query": TEXT, "documents": ["one", "another"]},
}
STREAMED = {
    path: {**BODIES[path], "stream": True}
    | (WITH_USAGE if path in (Endpoint.CHAT, Endpoint.COMPLETIONS) else {})
    for path in GENERATING
}
REQUESTS = [*BODIES.items(), *STREAMED.items()]
IDS = [*BODIES, *(f"{path}, streamed" for path in STREAMED)]


@pytest.fixture(params=[True, False], ids=["details", "no details"])
def replica(request: pytest.FixtureRequest) -> Replica:
    return Replica(replace(SETTINGS, enable_prompt_tokens_details=request.param))


async def chunks(client: ClientSession, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    async with client.post(path, json={**body, "ignore_eos": True}) as response:
        assert response.status == 200, await response.text()
        async for chunk in response.content.iter_any():
            yield chunk


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=IDS)
async def test_usage_reader_agrees_with_the_engine_counters(
    client: ClientSession, replica: Replica, path: str, body: dict[str, Any]
) -> None:
    counters = replica.engine.counters
    for repeated in (False, True):
        prompt, generated = counters.prompt_tokens, counters.generated_tokens
        cached = counters.cached_tokens
        reader = UsageReader(Endpoint(path))
        async for chunk in chunks(client, path, body):
            reader.feed(chunk)
        hits = counters.cached_tokens - cached
        details = replica.settings.enable_prompt_tokens_details and Endpoint(path).decodes
        reported = details or path == Endpoint.RESPONSES
        assert reader.usage() == ReportedUsage(
            counters.prompt_tokens - prompt,
            counters.generated_tokens - generated,
            hits if reported else None,
        )
        if repeated:
            assert counters.cached_tokens > cached
