"""What gateways speak: full duplex, a subset to choose from, error statuses."""

import json
from typing import Any

import pytest
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as BodyMode,
)
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
)
from envoy_data_plane.google.protobuf import Struct, Value

from extproc.config import Config
from extproc.proxy.services import Services
from extproc.request.media import LARGE_BODY
from tests.fakes import replica
from tests.proxy.conftest import put_replicas
from tests.proxy.envoy_side import CHAT, DUPLEX, EnvoySide, Stream, headers_message
from tests.proxy.replies import chosen, chunk_of, destination, status_of

MEMBERS = {replica(1), replica(2)}
BODY = json.dumps(CHAT).encode()


async def routed(stream: Stream, **headers: Any) -> ProcessingResponse:
    """Sends a whole chat; returns what its headers are answered with."""
    await stream.write_headers(**DUPLEX, **headers)
    await stream.write_body(BODY)
    return await stream.read()


async def test_headers_wait_for_the_body_which_goes_back_unchanged(
    envoy: EnvoySide, services: Services
) -> None:
    pieces = [BODY[:7], BODY[7:100], b"", BODY[100:]]
    async with envoy.stream() as stream:
        await stream.write_headers(**DUPLEX)
        for number, piece in enumerate(pieces):
            await stream.write_body(piece, number == len(pieces) - 1)
        reply = await stream.read()
        assert set(destination(reply)) == MEMBERS
        assert chosen(reply) == destination(reply)
        assert chunk_of(await stream.read()) == (BODY, True)
        assert services.log.after(0)[-1].decision.profile.model == "llama"

        await stream.response_headers(content_type="text/event-stream")
        for piece, last in ((b"\x00data: ", False), (b"[DONE]", True)):
            assert chunk_of(await stream.response_body(piece, last)) == (piece, last)
        assert (await stream.response_trailers()).response_trailers is not None
        await stream.end()
    assert services.fleet.in_flight == 0


async def test_trailers_end_the_body(envoy: EnvoySide) -> None:
    async with envoy.stream() as stream:
        await stream.write_headers(**DUPLEX)
        await stream.write_body(BODY, end_of_stream=False)
        await stream.write(ProcessingRequest(request_trailers=HttpTrailers(trailers=HeaderMap())))
        assert set(destination(await stream.read())) == MEMBERS
        assert chunk_of(await stream.read()) == (BODY, False)
        assert (await stream.read()).request_trailers is not None


async def test_no_more_of_a_body_is_held_than_is_read(envoy: EnvoySide, services: Services) -> None:
    piece = b" " * (LARGE_BODY // 4)
    async with envoy.stream() as stream:
        await stream.write_headers(**DUPLEX, headers={"content-length": str(40 * 2**20)})
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


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/tokenize")])
async def test_whatever_it_is_gets_an_endpoint(envoy: EnvoySide, method: str, path: str) -> None:
    async with envoy.stream() as stream:
        ends = method == "GET"
        reply = await stream.request_headers(path, method, end_of_stream=ends, **DUPLEX)
        assert set(destination(reply)) == MEMBERS
        if not ends:
            await stream.write_body(b"text")
            assert chunk_of(await stream.read()) == (b"text", True)
        await stream.response_headers()
        assert chunk_of(await stream.response_body(b"{}")) == (b"{}", True)
        await stream.end()


async def test_what_is_about_a_stored_response_gets_its_holder(
    envoy: EnvoySide, services: Services
) -> None:
    services.fleet.responses.keep("resp_1", replica(2))
    for subset, found in ((None, [replica(2)]), ([replica(1)], [replica(1)])):
        async with envoy.stream() as stream:
            path = "/v1/responses/resp_1"
            reply = await stream.request_headers(path, "GET", True, subset=subset, **DUPLEX)
            assert destination(reply)[:1] == found
            assert reply.mode_override is None


async def test_only_the_subset_is_chosen_from(envoy: EnvoySide) -> None:
    for _ in range(5):
        async with envoy.stream() as stream:
            reply = await routed(stream, subset=[replica(2), "10.9.9.9:8000"])
            assert destination(reply) == [replica(2)]


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:8000"]])
@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
async def test_a_subset_without_a_member_is_unavailable(
    envoy: EnvoySide, subset: list[str], mode: BodyMode
) -> None:
    async with envoy.stream() as stream:
        await stream.write_headers(body_mode=mode, subset=subset)
        if mode == BodyMode.BUFFERED:
            await stream.read()
        await stream.write_body(BODY)
        reply = await stream.read()
        assert status_of(reply) == 503
        assert reply.immediate_response is not None
        assert json.loads(reply.immediate_response.body)["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_without_a_ready_replica_it_is_unavailable(
    envoy: EnvoySide, services: Services, method: str
) -> None:
    put_replicas(services, healthy=False)
    async with envoy.stream() as stream:
        if method == "GET":
            reply = await stream.request_headers("/v1/models", "GET", end_of_stream=True, **DUPLEX)
        else:
            reply = await routed(stream)
        assert status_of(reply) == 503
        await stream.end()
    assert services.fleet.in_flight == 0


async def test_a_bad_body_is_refused_in_full_duplex_too(envoy: EnvoySide) -> None:
    async with envoy.stream() as stream:
        await stream.write_headers(**DUPLEX)
        await stream.write_body(b"not json")
        assert status_of(await stream.read()) == 400
        await stream.end()


async def test_the_endpoint_that_served_is_read_from_metadata(
    envoy: EnvoySide, services: Services
) -> None:
    async with envoy.stream() as stream:
        first, second = destination(await routed(stream))
        await stream.read()
        served = Struct(
            fields={"x-gateway-destination-endpoint-served": Value(string_value=second)}
        )
        await stream.send(
            response_headers=headers_message({":status": "200"}, end_of_stream=False),
            metadata_context=Metadata(filter_metadata={"envoy.lb": served}),
        )
        assert services.fleet.in_flight_on(second) == 1
        assert services.fleet.in_flight_on(first) == 0


class TestSaturated:
    @pytest.fixture
    def config(self) -> Config:
        return Config.model_validate({"route": {"max_ttft_s": 0.5}})

    async def test_what_would_wait_too_long_is_refused(
        self, envoy: EnvoySide, services: Services
    ) -> None:
        long = {"model": "llama", "prompt": list(range(10_000))}  # 2.6 s of prefill
        reply = await envoy.ask(long, "/v1/completions")
        assert status_of(reply) == 429
        assert reply.immediate_response is not None
        assert reply.immediate_response.headers is not None
        told = {
            option.header.key: option.header.raw_value
            for option in reply.immediate_response.headers.set_headers
            if option.header is not None
        }
        assert told["retry-after"] == b"3"
        assert set(destination(await envoy.ask())) == MEMBERS
        assert services.fleet.in_flight == 0
