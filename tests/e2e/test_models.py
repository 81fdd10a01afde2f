"""``GET /v1/models`` lists the models of all replicas, in each protocol."""

from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from extproc.lab.harness.stack import SimulatedReplica
from tests.e2e.client import Client
from tests.e2e.stack import Behind, Stack, here
from tests.waiting import until_read

pytestmark = [
    pytest.mark.process,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("stack", ["envoy", "istio", "endpoint_picker"], indirect=True),
]
REPLICAS = (
    SimulatedReplica("one", "llama-8b-h100", ("--lora-modules", "law", "--max-model-len", "4096")),
    SimulatedReplica("two", "llama-8b-h100", ("--model", "qwen")),
)


def system(directory: Path) -> Stack:
    return Behind(directory, here(REPLICAS), pollers=0)


async def test_models_of_all_replicas_are_listed_as_vllm_lists_them(
    client: Client, stack: Stack
) -> None:
    expected: list[dict[str, Any]] = []
    for replica in REPLICAS:
        url = f"http://{stack.address(replica.name)}/v1/models"
        async with client.session.get(url) as response:
            expected += (await response.json())["data"]
        await until_read(partial(client.replica, replica.name), lambda now: now["models"])
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as sdk:
        found = [model.to_dict() async for model in sdk.models.list()]
    by_id = {model["id"]: model for model in expected}
    assert {str(model["id"]) for model in found} == by_id.keys()
    for model in found:
        own = by_id[str(model["id"])]
        # vLLM gives no context length for an adapter, which has its model's.
        context = by_id[own["parent"] or own["id"]]["max_model_len"]
        unknown = {"root": None, "created": model["created"]}
        assert model == own | unknown | {"max_model_len": context}
