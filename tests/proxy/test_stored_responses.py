"""Requests that continue a stored response go to the replica that owns it."""

import json
from typing import Any
from unittest.mock import Mock

import pytest

from extproc.proxy import in_flight
from extproc.proxy.services import Services
from extproc.request.media import LARGE_BODY
from extproc.request.usage import HEAD_BYTES, response_id
from tests.fakes import replica
from tests.proxy.conftest import config_of, router_of
from tests.proxy.envoy_side import EnvoySide, Local, Stream
from tests.proxy.replies import BodyMode, chosen, destination, mode_of

RESPONSES = "/v1/responses"
REQUEST = {"model": "llama", "input": "Tell me of the sea."}


async def respond(
    envoy: EnvoySide, upstream: str, body: dict[str, Any], number: int = 1
) -> BodyMode | None:
    streamed = body.get("stream", False)
    async with envoy.stream() as stream:
        reply = await stream.request_headers(RESPONSES)
        assert reply.mode_override is None  # Envoy forwards the response
        await stream.request_body(REQUEST | body)
        kind = "text/event-stream" if streamed else "application/json"
        reply = await stream.response_headers(upstream=upstream, content_type=kind)
        mode = None if reply.mode_override is None else mode_of(reply).response_body_mode
        whole = json.dumps({"id": f"resp_{number}", "output": []}).encode()
        created = b'event: response.created\ndata: {"response":' + whole + b"}\n\n"
        if mode is not None:
            await stream.response_body(created if streamed else whole)
        await stream.end()
    return mode


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("second", [False, True])
async def test_stored_response_continues_on_its_owner(
    envoy: EnvoySide, services: Services, streamed: bool, second: bool
) -> None:
    """The owner is the replica that served, even if another was chosen."""
    served = replica(2 if second else 1)
    await respond(envoy, served, {"stream": streamed})
    for _ in range(5):
        reply = await envoy.ask(REQUEST | {"previous_response_id": "resp_1"}, RESPONSES)
        assert destination(reply) == [served, served]  # another replica would answer 404
    for method, path in (("GET", "/resp_1"), ("POST", "/resp_1/cancel"), ("GET", "/resp_1?a=b")):
        async with envoy.stream() as stream:
            reply = await stream.request_headers(RESPONSES + path, method)
            assert destination(reply) == [served, served]
            assert mode_of(reply).request_body_mode == BodyMode.NONE
            await stream.answer()
    reply = await envoy.ask_body_first(b"{}", f"{RESPONSES}/resp_1/cancel")
    assert chosen(reply) == [served, served]
    assert services.fleet.in_flight == 0


async def test_large_body_is_read_to_find_the_owner(envoy: EnvoySide, services: Services) -> None:
    services.fleet.responses.remember("resp_1", replica(2))
    large = {"previous_response_id": "resp_1", "filler": "x" * LARGE_BODY}
    for _ in range(3):
        reply, _ = await envoy.route("headers first", REQUEST | large, RESPONSES)
        assert set(destination(reply)) == {replica(2)}


async def test_unknown_stored_response_goes_anywhere(stream: Stream) -> None:
    assert destination(await stream.request_headers(f"{RESPONSES}/resp_9", "GET")) == []


async def test_stored_streams_are_read_for_response_ids() -> None:
    services = router_of(config_of(serve={"chunks_per_s": 0.0}))
    envoy = EnvoySide(Local(services))
    while services.responses.takes(services.clock(), 1.0):
        pass  # the budget for other responses is spent
    for number in range(5):
        mode = await respond(envoy, replica(1), {"stream": True}, number)
        assert mode is BodyMode.STREAMED
    owners = [services.fleet.response_owner(f"resp_{number}") for number in range(5)]
    assert owners == [replica(1)] * 5
    unstored = {"stream": True, "store": False}
    assert await respond(envoy, replica(1), unstored, 200) is None
    assert services.fleet.response_owner("resp_200") is None


async def test_background_response_has_no_completion(envoy: EnvoySide, services: Services) -> None:
    await respond(envoy, replica(1), {"background": True})
    (record,) = services.log.last(9)
    assert record.outcome.status == 200
    assert record.outcome.completion_s is None
    assert services.fleet.response_owner("resp_1") == replica(1)


@pytest.mark.parametrize(
    ("chunks", "searches", "owner"),
    [
        ([b'{"id":"resp_', b'1","output":[', b"]}"], 2, replica(1)),
        ([b" " * HEAD_BYTES, b'{"id":"resp_1","output":[', b"]}"], 1, ""),
    ],
)
async def test_id_is_searched_until_it_is_found_or_too_late(
    envoy: EnvoySide, services: Services, monkeypatch: pytest.MonkeyPatch,
    chunks: list[bytes], searches: int, owner: str,
) -> None:  # fmt: skip
    search = Mock(side_effect=response_id)
    monkeypatch.setattr(in_flight, "response_id", search)
    await envoy.converse(REQUEST, *chunks, upstream=replica(1), path=RESPONSES)
    assert search.call_count == searches
    assert (services.fleet.response_owner("resp_1") or "") == owner
