"""Malformed requests are refused with vLLM's status and error."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from io import BytesIO
from typing import Any

import pytest
from aiohttp import ClientSession
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.simulator.answers import GENERATING
from extproc.lab.simulator.pooling import POOLING
from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import serving
from tests.lab.simulator.conftest import CHAT, chat, reply


async def assert_refused(client: ClientSession, path: str, body: bytes) -> None:
    async with client.post(path, data=body) as response:
        assert response.status == 400, (body, await response.text())
        error = (await response.json())["error"]
        assert error["type"] == "BadRequestError", body
        assert error["message"]


NO_OBJECTS = (
    *(b"", b"{nope", b"[]", b"null", b"{}x", b'{"model": "\xff"}', b"[" * 10_000, b"1" * 5000),
)


@pytest.mark.parametrize("path", [*GENERATING, *POOLING, "/tokenize", "/simulate"])
async def test_body_that_is_no_json_object_is_refused(client: ClientSession, path: str) -> None:
    for body in NO_OBJECTS:
        await assert_refused(client, path, body)


INVALID: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        *({}, {"messages": []}, {"messages": "hello"}, {"messages": [{"content": "hello"}]}),
        *({"messages": [{"role": "user", "content": 5}]}, chat("word " * 4000)),
        *(chat(max_tokens=bound) for bound in (0, -1, 1e30, float("nan"), "many", 5000)),
        *(chat(max_tokens=5, min_tokens=6), chat(n=0), chat(n=10**9), chat(temperature="hot")),
        chat(stream_options={"include_usage": True}),
    ],
    "/v1/completions": [
        *({}, {"prompt": "a", "stream_options": {"include_usage": True}}, {"prompt": ""}),
        *({"prompt": []}, {"prompt": [[]]}, {"prompt": ["hello", ""]}, {"prompt": [-1]}),
        *({"prompt": [1.5]}, {"prompt": [1, "two"]}, {"prompt": [2**40]}, {"prompt": [1] * 4096}),
    ],
    "/v1/responses": [{"input": ""}, {"input": []}, {"input": "a", "max_output_tokens": -5}],
    "/v1/messages": [chat()],
    "/v1/embeddings": [{"input": []}, {"input": [1] * 4097}],
    "/v1/score": [{"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, {"text_1": "a"}],
    "/v1/rerank": [{"query": "a", "documents": []}],
    "/tokenize": [{}],
    "/simulate": [{"slow": 0}, {"slow": 1e300}, {"fail": 200}, {"explode": True}],
}


@pytest.mark.parametrize("path", INVALID)
async def test_invalid_field_is_refused(client: ClientSession, path: str) -> None:
    for body in INVALID[path]:
        await assert_refused(client, path, json.dumps(body).encode())


async def test_longest_prompt_leaves_a_token_to_generate(client: ClientSession) -> None:
    answer = await reply(client, "/v1/completions", {"prompt": [1] * 4095, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", [*GENERATING, *POOLING])
async def test_unknown_model_is_not_found(client: ClientSession, path: str) -> None:
    prompts = ("prompt", "input", "query", "documents", "text_1", "text_2")
    body = chat(max_tokens=5, **dict.fromkeys(prompts, "hello")) | {"model": "other"}
    error = (await reply(client, path, body, status=404))["error"]
    assert error["type"] == "NotFoundError"
    assert error["message"] == "The model `other` does not exist."


@pytest.mark.parametrize("encoding", ["gzip", "br", "nonsense"])
async def test_content_encoding_is_ignored(client: ClientSession, encoding: str) -> None:
    body = json.dumps(chat(max_tokens=1)).encode()
    headers = {"content-encoding": encoding}
    async with client.post(CHAT, data=body, headers=headers) as response:
        assert response.status == 200


async def test_large_image_counts_as_an_image(client: ClientSession) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (40 << 20)}}
    body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
    async with client.post(CHAT, data=BytesIO(json.dumps(body).encode())) as response:
        assert (await response.json())["usage"]["prompt_tokens"] < 600


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = (
    *("messages", "prompt", "input", "query", "documents", "text_1", "text_2", "system", "tools"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "ignore_eos", "n"),
    *("instructions", "encoding_format", "temperature", "stream_options", "model"),
)
bodies = st.dictionaries(
    st.sampled_from(FIELDS),
    json_values
    | st.lists(st.fixed_dictionaries({"role": st.text(max_size=5), "content": json_values})),
    max_size=6,
)


@pytest.fixture(scope="module")
def status_of() -> Iterator[Callable[[str, bytes], int]]:
    """Return a function that posts a body to a replica and returns the status."""
    with asyncio.Runner() as loop:
        replica = Replica(ReplicaSettings(speed=1000, max_model_len=256))
        running = AsyncExitStack()
        port, _ = loop.run(running.enter_async_context(serving(replica, "127.0.0.1", 0)))

        async def status(path: str, body: bytes) -> int:
            async with (
                ClientSession(f"http://127.0.0.1:{port}") as session,
                session.post(path, data=body) as response,
            ):
                await response.read()
                return response.status

        yield lambda path, body: loop.run(status(path, body))
        loop.run(running.aclose())


@given(path=st.sampled_from([*GENERATING, *POOLING, "/tokenize"]), body=bodies)
def test_random_body_causes_no_server_error(
    status_of: Callable[[str, bytes], int], path: str, body: dict[str, Any]
) -> None:
    assert status_of(path, json.dumps(body).encode()) in (200, 400, 404)
