"""Clients ask for one name, replicas serve the model under others."""

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import yaml

from extproc.lab.harness.envoy_config import Bootstrap
from extproc.lab.harness.stack import SimulatedReplica
from tests.e2e.client import Answer, Client
from tests.e2e.stack import Behind

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

REPLICAS = (
    SimulatedReplica("one", "llama-8b-h100", ("--model", "llama-a")),
    SimulatedReplica("two", "llama-8b-h100", ("--model", "llama-b")),
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
    "serve": {"chunks_per_s": 1e6, "drain_s": 1.0, "second_choice": True},
}
ENVOYS = ("envoy", "partial", "endpoint_picker")
"""Bodies in one piece, as much of them as Envoy holds, and in full duplex."""


class Named(Behind):
    """Two replicas of one model that each have a name of their own for it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, REPLICAS, SETTINGS)

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        if self.name == "partial":
            whole, part = "_mode: BUFFERED\n", "_mode: BUFFERED_PARTIAL\n"
            bootstrap = yaml.safe_load(yaml.safe_dump(bootstrap).replace(whole, part))
            assert "BUFFERED_PARTIAL" in str(bootstrap)
        return bootstrap


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Named]:
    async with Named(tmp_path_factory.mktemp("names")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=ENVOYS)
async def stack(request: pytest.FixtureRequest, running: Named) -> Named:
    await running.behind(request.param)
    return running


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


async def test_a_name_that_a_replica_serves_itself_stays(client: Client) -> None:
    answers = [await client.chat(model="llama-b") for _ in range(3)]
    assert names_sent(answers) == {"llama-b"}


async def test_models_are_drawn_by_weight_of_those_that_are_served(client: Client) -> None:
    answers = [await client.chat(model="canary", tokens=1) for _ in range(40)]
    assert names_sent(answers) == {"llama-a", "llama-b"}
    drawn = [answer.decision["served_as"] for answer in answers]
    assert 2 <= drawn.count("llama-b") <= 20


async def test_the_openai_client_and_streams_work(stack: Named) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as sdk:
        for _ in range(2):
            whole = await sdk.chat.completions.create(
                model="llama", messages=messages, max_tokens=5
            )
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 5
            stream = await sdk.chat.completions.create(
                model="llama", messages=messages, max_tokens=5, stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == whole.choices[0].message.content


async def test_the_list_of_models_has_every_name(stack: Named) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as sdk:
        models = [model async for model in sdk.models.list()]
    assert [model.id for model in models] == [
        "canary", "chat/latest", "llama", "llama-a", "llama-b",
    ]  # fmt: skip
    assert {model.to_dict()["max_model_len"] for model in models} == {32_768}


@pytest.mark.parametrize("chunked", [False, True])
async def test_all_else_of_a_body_arrives_as_it_was_sent(client: Client, chunked: bool) -> None:
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


async def test_a_retry_does_not_get_to_a_replica_with_another_name(client: Client) -> None:
    """It would answer 404, which nobody tries again."""
    await client.simulate("one", fail=503)
    try:
        of_both = [await client.chat(model="llama") for _ in range(2)]
        of_one = await client.chat(model="llama-a")
    finally:
        await client.simulate("one", fail=0)
    assert {answer.status for answer in of_both} == {200, 503}
    assert of_one.status == 503
