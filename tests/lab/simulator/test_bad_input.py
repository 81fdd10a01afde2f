"""Whatever a client sends gets a defined answer."""

import asyncio
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import pytest
from aiohttp import ClientSession
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.simulator.answers import GENERATING
from extproc.lab.simulator.pooling import POOLING
from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import OUTPUT_TOKENS_HEADER, start

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


async def refused(client: ClientSession, path: str, body: bytes | dict[str, Any]) -> str:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.post(path, data=data) as response:
        assert response.status == 400, await response.text()
        error = (await response.json())["error"]
        assert error["type"] == "BadRequestError"
        message: str = error["message"]
        return message


@pytest.mark.parametrize("path", [*GENERATING, *POOLING, "/tokenize", "/simulate"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{nope", b"[]", b"null", b"{}x", b'{"model": "\xff"}', b"[" * 10_000, b"1" * 5000],
)
async def test_not_json_or_not_an_object(client: ClientSession, path: str, body: bytes) -> None:
    await refused(client, path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "hello"}),
        (CHAT, {"messages": [{"content": "hello"}]}),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}),
        (CHAT, {"messages": MESSAGES, "max_tokens": -1}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1e30}),
        (CHAT, {"messages": MESSAGES, "max_tokens": float("nan")}),
        (CHAT, {"messages": MESSAGES, "max_tokens": "many"}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 5000}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 5, "min_tokens": 6}),
        (CHAT, {"messages": MESSAGES, "n": 0}),
        (CHAT, {"messages": MESSAGES, "n": 10**9}),
        (CHAT, {"messages": MESSAGES, "temperature": "hot"}),
        (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 4000}]}),
        ("/v1/completions", {}),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": [[]]}),
        ("/v1/completions", {"prompt": ["hello", ""]}),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/completions", {"prompt": [1.5]}),
        ("/v1/completions", {"prompt": [1, "two"]}),
        ("/v1/completions", {"prompt": [2**40]}),
        ("/v1/completions", {"prompt": [1] * 4096}),
        ("/v1/responses", {"input": ""}),
        ("/v1/responses", {"input": []}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": -5}),
        ("/v1/messages", {"messages": MESSAGES}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/embeddings", {"input": [1] * 4097}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        ("/v1/score", {"text_1": "a"}),
        ("/v1/rerank", {"query": "a", "documents": []}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}),
        ("/tokenize", {}),
        ("/simulate", {"slow": 0}),
        ("/simulate", {"slow": 1e300}),
        ("/simulate", {"fail": 200}),
        ("/simulate", {"explode": True}),
    ],
)
async def test_wrong_fields(client: ClientSession, path: str, body: dict[str, Any]) -> None:
    await refused(client, path, body)


async def test_errors_name_the_field(client: ClientSession) -> None:
    message = await refused(client, CHAT, {"messages": MESSAGES, "max_tokens": "many"})
    assert "max_tokens" in message


async def test_a_prompt_that_fills_the_context_leaves_no_room(client: ClientSession) -> None:
    body = {"prompt": [1] * 4095, "ignore_eos": True}
    async with client.post("/v1/completions", json=body) as response:
        assert (await response.json())["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", [*GENERATING, *POOLING])
async def test_an_unknown_model_is_not_found(client: ClientSession, path: str) -> None:
    body = {
        "model": "other",
        "messages": MESSAGES,
        "max_tokens": 5,
        **dict.fromkeys(("prompt", "input", "query", "documents", "text_1", "text_2"), "hello"),
    }
    async with client.post(path, json=body) as response:
        assert response.status == 404
        error = (await response.json())["error"]
        assert (error["type"], error["message"]) == (
            "NotFoundError",
            "The model `other` does not exist.",
        )


async def test_unknown_paths_and_methods(client: ClientSession) -> None:
    async with client.get("/nowhere") as response:
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "NotFoundError"
    async with client.get(CHAT) as response:
        assert response.status == 405


@pytest.mark.parametrize("value", ["", "0", "-1", "many", "1e3", "9" * 30])
async def test_a_wrong_header(client: ClientSession, value: str) -> None:
    headers = {OUTPUT_TOKENS_HEADER: value}
    async with client.post(CHAT, json={"messages": MESSAGES}, headers=headers) as response:
        assert response.status == 400


@pytest.mark.parametrize("encoding", ["gzip", "br", "nonsense"])
async def test_a_body_that_is_not_encoded_as_it_claims(
    client: ClientSession, encoding: str
) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
    headers = {"content-encoding": encoding}
    async with client.post(CHAT, data=body, headers=headers) as response:
        assert response.status == 200


async def test_a_large_image_is_one_image(client: ClientSession) -> None:
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
    *("instructions", "top_n", "encoding_format", "temperature", "stream_options", "model"),
)
bodies = st.dictionaries(
    st.sampled_from(FIELDS),
    json_values
    | st.lists(st.fixed_dictionaries({"role": st.text(max_size=5), "content": json_values})),
    max_size=6,
)


@pytest.fixture(scope="module")
def status_of() -> Iterator[Callable[[str, bytes], int]]:
    """Posts to one replica, from tests that are not asynchronous."""
    with asyncio.Runner() as loop:
        replica = Replica(ReplicaSettings(speed=1000, max_model_len=256))
        runner, port, _ = loop.run(start(replica, "127.0.0.1", 0))

        async def status(path: str, body: bytes) -> int:
            async with (
                ClientSession(f"http://127.0.0.1:{port}") as session,
                session.post(path, data=body) as response,
            ):
                await response.read()
                return response.status

        yield lambda path, body: loop.run(status(path, body))
        loop.run(runner.cleanup())


@given(path=st.sampled_from([*GENERATING, *POOLING, "/tokenize"]), body=bodies)
def test_no_body_is_answered_with_a_server_error(
    status_of: Callable[[str, bytes], int], path: str, body: dict[str, Any]
) -> None:
    assert status_of(path, json.dumps(body).encode()) in (200, 400, 404)
