"""The endpoint picker's protocol of gateways, in full duplex."""

import json

import pytest

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.fleet.members import ModelNames
from extproc.predict.lengths import OutputLengths
from extproc.proxy.body_memory import BODY_LIMIT_BYTES, BODY_MEMORY_BYTES
from extproc.proxy.services import Services
from extproc.request.media import LARGE_BODY
from tests.fakes import replica
from tests.proxy.conftest import config_of, on_fleet, put_replicas, samples
from tests.proxy.envoy_side import CHAT, DUPLEX, EnvoySide, Local, Stream
from tests.proxy.replies import (
    MEMBERS,
    chunk_of,
    destination,
    error_of,
    status_of,
)

BODY = json.dumps(CHAT).encode()


@pytest.fixture
def config() -> Config:
    return config_of(route={"seed": 1}, serve={"second_choice": True})


@pytest.mark.parametrize("config", [config_of(route={"seed": 1})])
async def test_duplex_names_one_replica(envoy: EnvoySide, services: Services) -> None:
    services.fleet.responses.remember("resp_1", replica(2))
    for body, path in ((CHAT, "/v1/chat/completions"), (None, "/v1/responses/resp_1")):
        async with envoy.stream() as stream:
            method = "GET" if body is None else "POST"
            await stream.write_headers(path, method, body is None)
            if body is not None:
                await stream.write_body(BODY)
            assert len(destination(await stream.read())) == 1
    assert len(destination(await envoy.ask())) == 2


async def test_duplex_buffers_no_more_than_it_reads(stream: Stream, services: Services) -> None:
    piece = b" " * (LARGE_BODY // 4)
    await stream.write_headers(headers={"content-length": str(40 * 2**20)})
    await stream.write_body(BODY[:-1] + piece, end_of_stream=False)
    for _ in range(3):
        await stream.write_body(piece, end_of_stream=False)
    assert set(destination(await stream.read())) == MEMBERS
    held = len(BODY) - 1 + 4 * len(piece)
    while held:
        held -= len(chunk_of(await stream.read())[0])
    await stream.write_body(piece, end_of_stream=False)
    assert chunk_of(await stream.read()) == (piece, False)
    await stream.write_body(b"}")
    assert chunk_of(await stream.read()) == (b"}", True)


async def duplex_of_large(
    stream: Stream, body: bytes, path: str = "/v1/chat/completions"
) -> list[str]:
    await stream.write_headers(path, headers={"content-length": str(len(body))})
    for start in range(0, len(body), LARGE_BODY // 2):
        piece = body[start : start + LARGE_BODY // 2]
        await stream.write_body(piece, start + len(piece) == len(body))
    return destination(await stream.read())


@pytest.mark.parametrize("model", ["alias", "other"])
@pytest.mark.parametrize("filler", [LARGE_BODY, 2 * LARGE_BODY])
async def test_duplex_large_body_is_read_until_its_model(
    services: Services, model: str, filler: int
) -> None:
    """The model may come last: openai-python writes the messages first."""
    names = ModelNames({"alias": ("other",)})
    services = on_fleet(services, Fleet(OutputLengths(), names=names))
    put_replicas(services, 1)
    put_replicas(services, 2, models=("other",))
    request = {"messages": CHAT["messages"], "filler": "x" * filler, "model": model, "n": 1}
    async with EnvoySide(Local(services)).stream() as stream:
        assert set(await duplex_of_large(stream, json.dumps(request).encode())) == {replica(2)}
        returned = await stream.request_chunks()
        assert json.loads(returned) == request | {"model": "other"}
        await stream.end()
    assert services.body_memory.free == BODY_MEMORY_BYTES


async def test_duplex_large_body_is_read_until_the_response_that_it_continues(
    envoy: EnvoySide, services: Services
) -> None:
    services.fleet.responses.remember("resp_1", replica(2))
    body = {"model": "llama", "input": "x" * LARGE_BODY, "previous_response_id": "resp_1"}
    for _ in range(3):
        async with envoy.stream() as stream:
            data = json.dumps(body).encode()
            assert set(await duplex_of_large(stream, data, "/v1/responses")) == {replica(2)}
            assert await stream.request_chunks() == data
            await stream.end()


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/chat/completions", {"type": "invalid_request_error", "param": "model"}),
        ("/v1/messages", {"type": "request_too_large"}),
    ],
)
async def test_duplex_body_without_model_is_refused(
    stream: Stream, services: Services, path: str, error: dict[str, str]
) -> None:
    put_replicas(services, 2, models=("other",))
    await stream.write_headers(path)
    await stream.write_body(b'{"filler": "', end_of_stream=False)
    for _ in range(BODY_LIMIT_BYTES // LARGE_BODY):
        await stream.write_body(b"x" * LARGE_BODY, end_of_stream=False)
    reply = await stream.read()
    assert status_of(reply) == 413
    assert error_of(reply).items() >= error.items()


async def test_duplex_stored_response_reaches_owner(envoy: EnvoySide, services: Services) -> None:
    services.fleet.responses.remember("resp_1", replica(2))
    for subset, chosen_first in ((None, [replica(2)]), ([replica(1)], [replica(1)])):
        async with envoy.stream() as stream:
            path = "/v1/responses/resp_1"
            reply = await stream.request_headers(path, "GET", True, subset=subset, **DUPLEX)
            assert destination(reply)[:1] == chosen_first
            assert reply.mode_override is None


@pytest.mark.parametrize("path", ["/health", "/v1/responses/resp_1"])
async def test_duplex_request_that_is_refused_counts_once(
    stream: Stream, services: Services, path: str
) -> None:
    reply = await stream.request_headers(path, "GET", True, subset=["10.0.0.9:8000"], **DUPLEX)
    assert status_of(reply) == 503
    assert samples(services.metrics.requests) == {("refused",): 1}
