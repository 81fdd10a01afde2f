import json
from pathlib import Path

import openai
import pytest

from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import Client
from tests.e2e.stack import Stack
from tests.waiting import until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

REPLICAS = (
    SimulatedReplica("one", "llama-8b-h100"),
    SimulatedReplica("another", "llama-8b-h100", ("--model", "another")),
)


def system(directory: Path) -> Stack:
    return Stack(directory, REPLICAS, {"serve": {"chunks_per_s": 1e6}, "hold": {"empty_s": 1}})


async def test_model_whose_replicas_are_down_is_not_unknown(client: Client, stack: Stack) -> None:
    assert (await client.chat()).decision["replica_name"] == "one"
    await stack.kill("one")
    await until_read(lambda: client.replica("one"), lambda now: not now["healthy"])
    for _ in range(4):
        answer = await client.chat()
        assert answer.status == 503, "another model's replica answers 404, and nobody tries again"
        assert answer.headers["Retry-After"] == "1"
        assert json.loads(answer.body)["error"]["type"] == "service_unavailable_error"
        assert (await client.chat(model="another")).decision["replica_name"] == "another"
    assert (await client.chat(model="nobody's")).status == 404
    await stack.start("one")
    await until_read(client.chat, lambda now: now.status == 200)
    assert (await client.chat(model=MODEL)).decision["replica_name"] == "one"


async def test_model_that_nobody_serves_does_not_exist(client: Client, stack: Stack) -> None:
    await until_read(lambda: client.chat(model="nobody's"), lambda now: now.status == 404)
    answer = await client.chat(model="nobody's")
    assert "Retry-After" not in answer.headers
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "model")
    assert error["code"] == "model_not_found"
    assert error["message"].endswith(f"There are: `another`, `{MODEL}`.")
    assert answer.decisions == []
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as sdk:
        with pytest.raises(openai.NotFoundError, match="`nobody's` does not exist"):
            await sdk.embeddings.create(model="nobody's", input="sea")
