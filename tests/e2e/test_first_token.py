"""A prompt is in the backlog until its first token, however early its stream opens."""

import asyncio
import json

import aiohttp
import pytest
import pytest_asyncio

from extproc.lab.harness.stack import MODEL
from tests.e2e.client import Client
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]
HOST = "alone.example"

PROMPT_TOKENS = 30_000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(pools: Stack) -> Stack:
    return pools


async def opened(client: Client, name: str) -> aiohttp.ClientResponse:
    """Sends a long prompt; returns when the stream has opened."""
    text = name + "word" * PROMPT_TOKENS
    body = {"model": MODEL, "input": text, "max_output_tokens": 2, "stream": True}
    response = await client._session.post(
        client._stack.url + "/v1/responses",
        data=json.dumps(body),
        headers={"host": HOST, "content-type": "application/json", "x-request-id": name},
    )
    assert response.status == 200
    seen = b""
    while b"event: response.in_progress" not in seen:
        seen += await response.content.readany()
    assert b"response.output_item" not in seen
    return response


async def test_opened_responses_stream_leaves_prompt_in_backlog(client: Client) -> None:
    responses = await asyncio.gather(*[opened(client, f"prompt {number}") for number in range(8)])
    responses.append(await opened(client, "the next"))
    (decision,) = await client.decisions("the next")
    for response in responses:
        response.close()
    assert decision["candidates"][0]["backlog_tokens"] > 5 * PROMPT_TOKENS  # one takes 8 s
    await client.ledger_empty()


async def test_the_first_token_of_a_responses_stream_comes_with_its_text(client: Client) -> None:
    body = {"model": MODEL, "input": "word" * 20_000, "max_output_tokens": 1, "stream": True}
    answer = await client.request("POST", "/v1/responses", body)
    outcome = answer.decision["outcome"]
    # A prefill of 20,000 tokens takes five seconds on this card; the token ends the answer.
    assert outcome["ttft_s"] > 0.5 * outcome["completion_s"]
