"""Requests of which Envoy tells the body first, with what matters of the headers beside it."""

import gzip
import json

import pytest

from extproc.config import Config
from extproc.proxy.services import Services
from tests.fakes import replica
from tests.proxy.conftest import config_of, samples
from tests.proxy.envoy_side import CHAT, EnvoySide, Stream
from tests.proxy.replies import MEMBERS, BodyMode, body_of, chosen, mode_of, status_of


@pytest.fixture
def config() -> Config:
    return config_of(
        route={
            "policy_header": "x-extproc-policy",
            "session_header": "X-Session",
            "session_cookie": "sid",
            "models": {"chat": "llama"},
            "seed": 1,
        },
        request={"tenant_header": "X-Tenant"},
        serve={"chunks_per_s": 1e6},
    )


async def test_body_first_request_is_routed(stream: Stream, services: Services) -> None:
    reply = await stream.body_first(CHAT, headers={"x-request-id": "abc"})
    assert reply.request_body is not None
    first, second = chosen(reply)
    assert {first, second} == MEMBERS
    assert services.fleet.in_flight_on(first) == 1
    reply = await stream.response_headers(upstream=second)
    assert mode_of(reply).response_body_mode == BodyMode.STREAMED
    assert services.fleet.in_flight_on(second) == 1
    await stream.response_body({"usage": {"prompt_tokens": 75, "completion_tokens": 33}})
    await stream.end()
    assert services.fleet.in_flight == 0
    (record,) = services.log.of_request("abc")
    assert record.outcome.output_tokens == 33
    assert record.outcome.served_by == second


@pytest.mark.parametrize("named", [{"x-session": "s"}, {"cookie": "a=b; sid=s"}])
async def test_body_first_reads_attributes(
    envoy: EnvoySide, services: Services, named: dict[str, str]
) -> None:
    await envoy.ask_body_first(CHAT, headers={"x-tenant": "t", **named})
    await envoy.ask_body_first(CHAT, headers={"x-extproc-policy": "round_robin"})
    first, second = services.log.last(2)
    assert first.decision.profile.tenant == "t"
    assert first.decision.profile.session
    assert not second.decision.profile.session
    assert second.decision.policy == "round_robin"


async def test_body_first_compressed_counts_by_length(envoy: EnvoySide, services: Services) -> None:
    body = gzip.compress(json.dumps(CHAT).encode()) + bytes(10_000)
    reply = await envoy.ask_body_first(body, headers={"content-encoding": "gzip"})
    assert set(chosen(reply)) == MEMBERS
    (record,) = services.log.last(1)
    assert record.decision.profile.prompt_tokens > 2000


async def test_body_first_routes_truncated_body(envoy: EnvoySide) -> None:
    """No more fits into Envoy's buffer."""
    body, mode = json.dumps({"model": "llama", **CHAT}).encode()[:-20], BodyMode.BUFFERED_PARTIAL
    reply = await envoy.ask_body_first(body, end_of_stream=False, mode=mode)
    assert set(chosen(reply)) == MEMBERS


async def test_body_first_before_trailers_is_whole(envoy: EnvoySide, stream: Stream) -> None:
    assert status_of(await envoy.ask_body_first(b"{", end_of_stream=False)) == 400
    reply = await stream.body_first(CHAT | {"model": "chat"}, end_of_stream=False)
    assert json.loads(body_of(reply) or b"") == CHAT
    assert (await stream.request_trailers()).request_trailers is not None


async def test_body_first_rewrites_model_name(envoy: EnvoySide) -> None:
    reply = await envoy.ask_body_first(CHAT | {"model": "chat"})
    assert json.loads(body_of(reply) or b"") == CHAT
    assert set(chosen(reply)) == MEMBERS


async def test_body_first_refuses_invalid_requests(envoy: EnvoySide, services: Services) -> None:
    for body, status in ((b"no json", 400), ({**CHAT, "model": "unknown"}, 404)):
        assert status_of(await envoy.ask_body_first(body)) == status
    assert services.fleet.in_flight == 0


@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses/resp_1/cancel"])
async def test_body_first_other_is_unrouted(stream: Stream, services: Services, path: str) -> None:
    reply = await stream.body_first(CHAT, path)
    assert reply.request_body is not None
    assert chosen(reply) == []
    assert (await stream.response_headers()).response_headers is not None
    await stream.end()
    assert services.fleet.in_flight == 0


async def test_body_first_cancel_reaches_its_owner(envoy: EnvoySide, services: Services) -> None:
    services.fleet.responses.saw("resp_1", replica(2))
    reply = await envoy.ask_body_first(b"{}", "/v1/responses/resp_1/cancel")
    assert chosen(reply) == [replica(2)] * 2


async def test_header_attributes_may_hold_any_bytes(envoy: EnvoySide, services: Services) -> None:
    """Envoy tells them as they came, though the message's field is text."""
    async with envoy.stream() as stream:
        message = stream.body_message(CHAT, headers={"x-session": "s?", "x-request-id": "abc"})
        reply = await stream.send_bytes(bytes(message).replace(b"s?", b"s\xff"))
        assert set(chosen(reply)) == MEMBERS
    (record,) = services.log.of_request("abc")
    assert record.decision.profile.session


async def test_skipped_response_is_not_unanswered(envoy: EnvoySide, services: Services) -> None:
    assert chosen(await envoy.ask_body_first(CHAT, headers={"x-extproc-unseen": "1"}))
    assert chosen(await envoy.ask_body_first())  # the client hung up
    assert samples(services.metrics.requests) == {("routed",): 2.0, ("unanswered",): 1.0}
