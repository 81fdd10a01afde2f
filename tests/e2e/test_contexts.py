"""Replicas of one model with contexts of different lengths: a prompt goes where it fits."""

from typing import Any

import pytest
import pytest_asyncio

from extproc.lab.harness.stack import MODEL
from tests.e2e.client import CHAT, Client
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]
HOST = "contexts.example"

WORDS = "sea " * 10_000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(pools: Stack) -> Stack:
    return pools


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": WORDS}], "n": 4, "max_tokens": 4}),
        ("/v1/completions", {"prompt": ["sea"] * 9 + [WORDS], "max_tokens": 4}),
        ("/v1/embeddings", {"input": [WORDS, "sea"]}),
        ("/v1/rerank", {"query": "sea", "documents": ["sea", WORDS]}),
    ],
)
async def test_each_of_its_prompts_fits(client: Client, path: str, body: dict[str, Any]) -> None:
    answer = await client.request("POST", path, {"model": MODEL} | body)
    assert answer.status == 200
    assert (answer.decision["replica_name"], answer.decision["second"]) == ("long", None)


async def test_short_prompts_go_where_it_is_fast(client: Client) -> None:
    body = {"model": MODEL, "prompt": ["sea " * 1_000] * 10, "max_tokens": 4}
    answer = await client.request("POST", "/v1/completions", body)
    assert (answer.status, answer.decision["replica_name"]) == (200, "short")
