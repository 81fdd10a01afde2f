"""Bodies that the router changes: the model's name, and the priority of an objective."""

import asyncio
import io
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from extproc.lab.harness.envoy_config import Bootstrap
from extproc.lab.harness.stack import SimulatedReplica
from tests.e2e.client import CHAT, Answer, Client
from tests.e2e.stack import Behind, Stack, ext_proc_of
from tests.waiting import until, until_read

OBJECTIVE = "x-gateway-inference-objective"
ONE_BY_ONE = ("--max-num-seqs", "1", "--scheduling-policy")
REPLICAS = (
    SimulatedReplica("one", "llama-8b-h100", ("--model", "llama-a", *ONE_BY_ONE, "priority")),
    SimulatedReplica("two", "llama-8b-h100", ("--model", "llama-b", *ONE_BY_ONE, "fcfs")),
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
ENVOYS = ("envoy", "partial", "endpoint_picker", "istio")
"""Bodies in one piece, as much of them as Envoy holds, in full duplex, and after the headers."""
numbers = itertools.count()
pytestmark = [
    pytest.mark.process,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("stack", ENVOYS, indirect=True),
]


class Changing(Behind):
    """Two replicas of one model that each have a name of their own for it, and an order of their
    own; Envoy tells the header that names an objective, and nothing waits at the router."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, REPLICAS, SETTINGS)

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "priority_scheduling": True}

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        if told := ext_proc_of(bootstrap).get("request_attributes"):
            told.append(f"request.headers['{OBJECTIVE}']")
        if self.name == "partial":
            whole, part = "_mode: BUFFERED\n", "_mode: BUFFERED_PARTIAL\n"
            bootstrap = yaml.safe_load(yaml.safe_dump(bootstrap).replace(whole, part))
            assert "BUFFERED_PARTIAL" in str(bootstrap)
        return bootstrap


def system(directory: Path) -> Stack:
    return Changing(directory)


def names_sent(answers: list[Answer]) -> set[str]:
    assert {answer.status for answer in answers} == {200}, answers[0].body
    return {answer.decision["served_as"] for answer in answers}


@pytest.mark.parametrize("asked", ["llama", "chat/latest"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_replica_gets_name_it_knows(client: Client, asked: str, streamed: bool) -> None:
    answers = [await client.chat(model=asked, stream=streamed) for _ in range(4)]
    assert names_sent(answers) == {"llama-a", "llama-b"}
    for answer in answers:
        record = answer.decision
        assert record["model"] == asked
        assert record["served_as"] == {"one": "llama-a", "two": "llama-b"}[record["replica_name"]]
        assert record["outcome"]["served_by"] == record["replica"]


async def test_name_that_a_replica_serves_stays(client: Client) -> None:
    answers = [await client.chat(model="llama-b") for _ in range(3)]
    assert names_sent(answers) == {"llama-b"}


async def test_served_models_are_drawn_by_weight(client: Client) -> None:
    answers = [await client.chat(model="canary", tokens=1) for _ in range(40)]
    assert names_sent(answers) == {"llama-a", "llama-b"}
    drawn = [answer.decision["served_as"] for answer in answers]
    assert 2 <= drawn.count("llama-b") <= 20


async def test_list_of_models_has_every_name(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as sdk:
        models = [model async for model in sdk.models.list()]
    assert [model.id for model in models] == [
        "canary", "chat/latest", "llama", "llama-a", "llama-b",
    ]  # fmt: skip
    assert {model.to_dict()["max_model_len"] for model in models} == {32_768}


@pytest.mark.parametrize("chunked", [False, True])
async def test_rest_of_body_arrives_as_it_was_sent(client: Client, chunked: bool) -> None:
    """Two MB of text and a name at the end: the replica counts as when it is asked itself."""
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
        assert answer.status == 200, answer.body[:300]
        counts.append(json.loads(answer.body)["usage"]["prompt_tokens"])
    assert len(set(counts)) == 1


async def test_retry_avoids_replica_with_another_name(client: Client) -> None:
    """A replica that knows another name would answer 404, which nobody tries again."""
    await client.simulate("one", fail=503)
    try:
        of_both = [await client.chat(model="llama") for _ in range(2)]
        of_one = await client.chat(model="llama-a")
    finally:
        await client.simulate("one", fail=0)
    assert {answer.status for answer in of_both} == {200, 503}
    assert of_one.status == 503


async def ask(client: Client, objective: str, tokens: int, **fields: object) -> str:
    """The id of a request that was answered."""
    name = f"{objective}-{next(numbers)}"
    message = {"role": "user", "content": name}
    headers = {"x-request-id": name, "x-simulate-output-tokens": str(tokens)}
    headers |= {OBJECTIVE: objective, "x-vllm-priority": "-1000"}
    body = {"model": "llama", "messages": [message], "max_tokens": tokens} | fields
    assert (await client.send("POST", CHAT, body, headers)).status == 200
    return name


async def told(client: Client, field: str) -> dict[str, bool]:
    """Of each replica what the router knows."""
    return {one["name"]: one[field] for one in (await client.fleet())["replicas"]}


async def test_priority_scheduling_of_pool_reaches_router(client: Client) -> None:
    await until_read(
        lambda: told(client, "by_priority"), lambda now: now == {"one": True, "two": True}
    )


async def test_urgent_requests_go_first_where_priorities_count(client: Client) -> None:
    await until_read(lambda: told(client, "takes_priority"), lambda now: all(now.values()))
    # Both are busy all the while, and of those behind each is an order of its own.
    ended: list[str] = []

    async def noted(objective: str, **fields: object) -> None:
        ended.append(await ask(client, objective, 40, **fields))

    async def come(count: int, objective: str, **fields: object) -> None:
        tasks.extend(asyncio.create_task(noted(objective, **fields)) for _ in range(count))
        await until(lambda: at_replicas(client, len(tasks)))

    tasks: list[asyncio.Task[None]] = []
    await client.slow(100.0)
    await come(len(REPLICAS), "busy")
    await come(12, "batch", priority=-1000)
    await come(4, "urgent", priority=1000)
    await client.slow(1.0)
    await asyncio.gather(*tasks)
    batch, urgent = ["batch"] * 6, ["urgent"] * 2
    order = {"one": urgent + batch, "two": batch + urgent}
    served: dict[str, list[str]] = {name: [] for name in order}
    for name in ended:
        (record,) = await client.decisions(name)
        served[record["replica_name"]].append(name.partition("-")[0])
    assert served == {name: ["busy", *then] for name, then in order.items()}, (
        "whatever clients said"
    )


async def at_replicas(client: Client, count: int) -> bool:
    return sum([await client.load(one.name) for one in REPLICAS]) == count
