"""The router rewrites bodies: the model's name, and the priority of an objective."""

import asyncio
import io
import itertools
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import openai
import pytest

from extproc.lab.harness.stack import SimulatedReplica
from tests.e2e.client import CHAT, EnvoyClient
from tests.e2e.stack import Behind, here
from tests.waiting import until_read

OBJECTIVE = "x-gateway-inference-objective"
SHORT, ADAPTER = ("--max-model-len", "4096"), ("--lora-modules", "law")
ONE_BY_ONE = ("--max-num-seqs", "1", "--scheduling-policy")
REPLICAS = (
    SimulatedReplica("one", "llama-8b-h100", ("--model", "llama-a", *ONE_BY_ONE, "priority")),
    SimulatedReplica(
        "two", "llama-8b-h100", ("--model", "llama-b", *ONE_BY_ONE, "fcfs", *SHORT, *ADAPTER)
    ),
)
SETTINGS: dict[str, dict[str, object]] = {
    "route": {
        "models": {
            "llama": ["llama-a", "llama-b"],
            "chat/latest": "llama",
            "canary": {"llama-a": 3, "llama-b": 1, "nobody's": 4},
        },
        "policy": "round_robin",
        "seed": 1,
    },
    "hold": {
        "longest_s": 0,
        "objective_header": OBJECTIVE,
        "objectives": {"urgent": {"priority": 10}, "batch": {"priority": -20}},
    },
    "serve": {"chunks_per_s": 1e6, "drain_s": 1.0, "second_choice": True},
}
ENVOYS = ("envoy", "endpoint_picker", "istio")
"""Bodies buffered, in full duplex, and after the headers."""
numbers = itertools.count()
pytestmark = pytest.mark.parametrize("stack", ENVOYS, indirect=True)


class RewritingStack(Behind):
    """Two replicas of one model under different names: one orders by priority, one by arrival."""

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "priority_scheduling": True}


system = partial(
    RewritingStack,
    replicas=here(REPLICAS),
    settings=SETTINGS,
    headers=(OBJECTIVE,),
    pollers=0,
)


@pytest.mark.parametrize("asked", ["llama", "chat/latest"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_body_names_model_as_replica_serves_it(
    client: EnvoyClient, asked: str, streamed: bool
) -> None:
    answers = [await client.chat(model=asked, stream=streamed) for _ in range(4)]
    assert {answer.decision["served_as"] for answer in answers} == {"llama-a", "llama-b"}
    for answer in answers:
        record = answer.decision
        assert record["model"] == asked
        assert record["served_as"] == {"one": "llama-a", "two": "llama-b"}[record["replica_name"]]
        assert record["outcome"]["served_by"] == record["replica"]


async def test_every_name_is_listed_as_vllm_lists_its_models(client: EnvoyClient) -> None:
    own: dict[str, dict[str, Any]] = {}
    for replica in REPLICAS:
        async with client.session.get(
            f"http://{client.stack.address(replica.name)}/v1/models"
        ) as models:
            own |= {model["id"]: model for model in (await models.json())["data"]}
        await client.replica_is(replica.name, lambda now: now["models"])
    async with openai.AsyncOpenAI(base_url=f"{client.stack.url}/v1", api_key="none") as sdk:
        found = {model.id: model.to_dict() async for model in sdk.models.list()}
    assert [*found] == ["canary", "chat/latest", "llama", "law", "llama-a", "llama-b"]
    for name, model in found.items():
        # The smallest context length; an adapter, for which vLLM gives none, has its model's.
        context = {"max_model_len": 32_768 if name == "llama-a" else 4096}
        listed = own.get(name, own["llama-b"] | {"id": name})
        assert model == listed | {"root": None, "created": model["created"]} | context


async def test_request_that_only_names_a_model_reaches_a_replica_that_serves_it(
    client: EnvoyClient,
) -> None:
    """Two requests of each name: Envoy alone would send half of them to the wrong replica."""
    for model in ("llama", "chat/latest", "llama-a", "llama-b") * 2:
        answer = await client.request("POST", "/tokenize", {"model": model, "prompt": "The sea"})
        assert answer.decisions == []
    unknown = {"model": "nobody's", "prompt": "The sea"}
    answer = await client.request("POST", "/tokenize", unknown, status=404)
    assert json.loads(answer.body)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("chunked", [False, True])
async def test_rewritten_body_keeps_its_other_fields(client: EnvoyClient, chunked: bool) -> None:
    """A replica counts the same prompt tokens with and without a rewrite of 2 MB."""
    texts = ["The sea " * 25, 'a "b"\n\\ ' * 125_000]
    body = {"input": texts[0], "user": texts[1], "metadata": {"model": "y"}}

    async def pieces(data: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(data), 2**16):
            yield data[start : start + 2**16]

    counts = []
    for model in ("llama", "llama", "llama-a", "llama-b"):
        data = json.dumps(body | {"model": model}, ensure_ascii=False).encode()
        sent = pieces(data) if chunked else io.BytesIO(data)
        kind = {"content-type": "application/json"}
        answer = await client.request("POST", "/v1/embeddings", sent, kind)
        counts.append(json.loads(answer.body)["usage"]["prompt_tokens"])
    assert len(set(counts)) == 1


async def test_retry_avoids_replica_with_other_model_name(client: EnvoyClient) -> None:
    """The other replica would answer 404, which Envoy does not retry."""
    async with client.simulating("one", fail=503):
        of_both = [await client.chat(model="llama", status=None) for _ in range(2)]
        await client.chat(model="llama-a", status=503)
    assert {answer.status for answer in of_both} == {200, 503}


async def ask(client: EnvoyClient, objective: str, tokens: int, **fields: object) -> str:
    """Send a request; return its id after the response."""
    name = f"{objective}-{next(numbers)}"
    message = {"role": "user", "content": name}
    headers = {"x-request-id": name, "x-simulate-output-tokens": str(tokens)}
    headers |= {OBJECTIVE: objective, "x-vllm-priority": "-1000"}
    body = {"model": "llama", "messages": [message], "max_tokens": tokens} | fields
    assert (await client.send("POST", CHAT, body, headers)).status == 200
    return name


async def test_objective_orders_requests_by_priority_in_vllm(client: EnvoyClient) -> None:
    for replica in REPLICAS:
        await client.replica_is(replica.name, lambda now: now["takes_priority"])
    ended: list[str] = []

    async def send(objective: str, **fields: object) -> None:
        ended.append(await ask(client, objective, 40, **fields))

    async def queue(count: int, objective: str, **fields: object) -> None:
        tasks.extend(asyncio.create_task(send(objective, **fields)) for _ in range(count))
        await until_read(partial(client.load, "one", "two"), lambda now: now == len(tasks))

    tasks: list[asyncio.Task[None]] = []
    await client.slow(100.0)
    await queue(len(REPLICAS), "busy")
    await queue(12, "batch", priority=-1000)
    await queue(4, "urgent", priority=1000)
    await client.slow(1.0)
    await asyncio.gather(*tasks)
    batch, urgent = ["batch"] * 6, ["urgent"] * 2
    order = {"one": urgent + batch, "two": batch + urgent}
    served: dict[str, list[str]] = {name: [] for name in order}
    for name in ended:
        (record,) = await client.decisions(name)
        served[record["replica_name"]].append(name.partition("-")[0])
    assert served == {name: ["busy", *then] for name, then in order.items()}, (
        "priorities of clients have no effect"
    )
