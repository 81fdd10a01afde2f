"""Requests that the router observes: Envoy's choice stands, and is compared with the router's."""

import asyncio
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse

from extproc.config import Config
from extproc.proxy import messages
from extproc.proxy.headers import is_steered
from extproc.proxy.services import Services
from tests.fakes import MODEL, ManualClock, replica
from tests.proxy.conftest import config_of, put_replicas, router_of, samples, with_fleet
from tests.proxy.envoy_side import (
    CHAT,
    DUPLEX,
    EVENTS,
    LAST,
    NAMED,
    STREAMED,
    TOKEN,
    EnvoySide,
    Local,
    Stream,
    as_bytes,
)
from tests.proxy.replies import BodyMode, HeaderMode, chunk_of, mode_of, routed_to
from tests.waiting import until

OBSERVE = {"mode": "observe", "chunks_per_s": 1e6}
UNCHANGED = {
    phase: messages.proceed(phase)
    for phase in ("request_headers", "request_body", "request_trailers", "response_headers")
}
TEMPTING: dict[str, Any] = {
    "serve": OBSERVE | {"decision_metadata": True},
    "route": {"models": {"llama": MODEL}, "max_ttft_s": 1e-9},
    "hold": {"objectives": {"high": {"priority": 5, "models": [MODEL]}}},
}
"""Settings with which a steering router would rename, prioritize or refuse, or add metadata."""


@pytest.fixture
def config() -> Config:
    return config_of(serve=OBSERVE)


@pytest.fixture
def services(services: Services, clock: ManualClock) -> Services:
    return with_fleet(services, clock)


class Watched(Stream):
    """A request of an Envoy that does not wait: ``observability_mode``. Its end fails if the router
    has replied."""

    async def send(self, message: ProcessingRequest) -> ProcessingResponse:
        message.observability_mode, message.protocol_config = True, None
        await self.write(message)
        return ProcessingResponse()

    async def request(self, body: dict[str, Any]) -> None:
        await self.request_headers(headers=NAMED)
        data = as_bytes(body)
        size = len(data) // 3 + 1
        for start in range(0, len(data), size):
            await self.request_body(data[start : start + size], end_of_stream=False)
        await self.request_body(b"")


@pytest.fixture
async def watched(services: Services) -> Watched:
    return Watched(Local(services).begin())


def other_than(chosen: str) -> str:
    return replica(1) if chosen == replica(2) else replica(2)


@pytest.mark.parametrize("config", [config_of(**TEMPTING)])
@pytest.mark.parametrize("body", [CHAT, CHAT | {"model": "none", "priority": 7}, b"no JSON"])
async def test_replies_change_nothing(envoy: EnvoySide, services: Services, body: Any) -> None:
    async with envoy.stream() as headers_first:
        reply = await headers_first.request_headers(headers=NAMED)
        assert bytes(reply) == UNCHANGED["request_headers"]
        assert bytes(await headers_first.request_body(body)) == UNCHANGED["request_body"]
        reply = await headers_first.response_headers(400, replica(1))
        assert bytes(reply) == UNCHANGED["response_headers"]
        await headers_first.end()
    async with envoy.stream() as body_comes_first:
        assert bytes(await body_comes_first.body_first(body)) == UNCHANGED["request_body"]
        await body_comes_first.end()
    async with envoy.stream() as before_trailers:
        reply = await before_trailers.body_first(body, end_of_stream=False)
        assert bytes(reply) == UNCHANGED["request_body"]
        assert bytes(await before_trailers.request_trailers()) == UNCHANGED["request_trailers"]
        await before_trailers.end()
    counted = samples(services.metrics.requests)
    assert counted == {("observed",): 3.0}
    assert services.fleet.in_flight == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/files"])
async def test_large_body_passes_the_router_by(
    stream: Stream, services: Services, path: str
) -> None:
    large = NAMED | {"content-length": str(40 * 2**20)}
    reply = await stream.request_headers(path, headers=large)
    assert bytes(reply) == messages.RESPONSE_ONLY
    assert mode_of(reply).request_body_mode == BodyMode.NONE
    assert mode_of(reply).response_header_mode == HeaderMode.DEFAULT
    await stream.answer(upstream=replica(2))
    records = services.log.of_request("one")
    assert len(records) == (path != "/v1/files")
    for record in records:
        assert record.decision.profile.prompt_tokens == 40 * 576
        assert record.outcome.served_by == replica(2)


async def test_full_duplex_returns_each_chunk_at_once(envoy: EnvoySide) -> None:
    data = as_bytes(CHAT)
    async with envoy.stream() as stream:
        reply = await stream.request_headers(**DUPLEX)
        assert bytes(reply) == UNCHANGED["request_headers"]
        for chunk, last in ((data[:9], False), (data[9:], True)):
            assert chunk_of(await stream.request_body(chunk, last)) == (chunk, last)
        await stream.end()


@pytest.mark.parametrize("config", [config_of(serve=OBSERVE, route={"models": {"a": MODEL}})])
async def test_router_answers_no_list_of_models(envoy: EnvoySide) -> None:
    async with envoy.stream() as stream:
        reply = await stream.request_headers("/v1/models", "GET", end_of_stream=True)
        assert bytes(reply) == messages.RESPONSE_ONLY
        await stream.end()


async def test_request_is_predicted_from_streamed_body(
    envoy: EnvoySide, services: Services
) -> None:
    async with envoy.stream() as stream:
        await stream.request_headers(body_mode=BodyMode.STREAMED, headers=NAMED)
        data = as_bytes(CHAT)
        await stream.request_body(data[:9], end_of_stream=False)
        await stream.request_body(data[9:])
        await stream.response_headers(upstream=replica(2))
        await stream.end()
    (record,) = services.log.of_request("one")
    assert record.observed
    assert record.outcome.served_by == replica(2)
    assert record.decision.profile.prompt_tokens > 50


async def observes_one_request(services: Services) -> None:
    watched = Watched(Local(services).begin())
    await watched.request(CHAT)
    await watched.response_headers(upstream=replica(1))
    await watched.end()
    assert samples(services.metrics.requests) == {("observed",): 1.0}


async def test_router_that_routes_cannot_steer_in_observability_mode(clock: ManualClock) -> None:
    services = with_fleet(router_of(config_of()), clock)
    await observes_one_request(services)


async def until_answered(watched: Watched, services: Services, agrees: bool) -> tuple[str, str]:
    """Sends a request up to the response's headers; returns the router's choice and Envoy's."""
    await watched.request(STREAMED)
    await until(lambda: services.log.of_request("one"))
    choice = services.log.of_request("one")[0].decision.replica
    by_envoy = choice if agrees else other_than(choice)
    assert services.fleet.in_flight == 0
    await watched.response_headers(upstream=by_envoy, content_type=EVENTS)
    await until(lambda: services.fleet.in_flight)
    return choice, by_envoy


@pytest.mark.parametrize("agrees", [True, False])
async def test_choices_and_times_are_compared(
    watched: Watched, services: Services, clock: ManualClock, agrees: bool
) -> None:
    choice, by_envoy = await until_answered(watched, services, agrees)
    assert services.fleet.in_flight_on(by_envoy) == 1
    clock.advance(0.5)
    await watched.response_body(TOKEN, end_of_stream=False)
    await asyncio.sleep(0)
    clock.advance(2.0)
    await watched.response_body(LAST)
    await until(lambda: not services.fleet.in_flight)
    clock.advance(5.0)  # Envoy closes the stream late
    await watched.end()
    assert samples(services.metrics.requests) == {("observed",): 1.0}
    record = services.log.of_request("one")[0]
    assert (record.decision.replica, record.outcome.served_by) == (choice, by_envoy)
    assert record.outcome.completion_s == pytest.approx(2.5)
    assert record.outcome.output_tokens == 5
    assert samples(services.metrics.observed) == {("same" if agrees else "other",): 1.0}
    seconds = samples(services.metrics.observed_seconds)
    assert seconds["actual",] == pytest.approx(2.5)
    assert seconds["predicted_router",] == record.decision.predicted_completion
    (result,) = services.results
    assert result.replica == by_envoy
    assert seconds["predicted_envoy",] == result.predicted_s


@pytest.mark.parametrize(
    ("served_by", "status", "choice"),
    [(replica(2), 200, "other"), ("127.0.0.1:15001", 503, "unknown")],
    ids=["excluded replica", "no replica"],
)
async def test_response_of_another_than_the_choice_is_counted_as_such(
    watched: Watched, services: Services, served_by: str, status: int, choice: str
) -> None:
    put_replicas(services, 2, healthy=False)
    await watched.request(STREAMED)
    await watched.response_headers(status, served_by)
    await watched.end()
    assert samples(services.metrics.observed) == {(choice,): 1.0}
    outcome = services.log.of_request("one")[0].outcome
    assert (outcome.status, outcome.served_by == served_by) == (status, choice == "other")


async def test_answer_of_observed_request_ends_an_ejection(
    services: Services, clock: ManualClock
) -> None:
    for _ in range(3):
        services.fleet.eligibility.failed(replica(2))
    for ejected in (True, False):
        watched = Watched(Local(services).begin())
        await watched.request(CHAT)
        await watched.response_headers(upstream=replica(2))
        await watched.end()
        assert bool(services.fleet.view(MODEL, response_visible=False).excluded) is ejected
        clock.advance(1.1)


async def test_request_on_hung_replica_goes_on(services: Services) -> None:
    local = Local(services)
    watched = Watched(local.begin())
    _, on = await until_answered(watched, services, agrees=True)
    put_replicas(services, 1 + (on == replica(2)), healthy=False, unanswered_s=100.0)
    local.server.end_hung()
    assert services.fleet.in_flight_on(on) == 1
    await watched.end()


async def test_full_memory_is_no_reason_to_refuse(services: Services) -> None:
    services = replace(services, body_memory=type(services.body_memory)(10))
    await observes_one_request(services)
    assert services.body_memory.free == 10


def of(number: int) -> dict[str, str]:
    return {"x-request-id": str(UUID(int=number * 2**64))}


@pytest.mark.parametrize(
    ("serve", "least", "most"),
    [
        ({"share": 0}, 0, 0),
        ({"share": 0.05}, 30, 70),
        ({"share": 1}, 1000, 1000),
        ({"mode": "observe"}, 0, 0),
        ({"mode": "observe", "share": 0.5}, 0, 0),
    ],
)
def test_share_of_requests_is_steered(serve: dict[str, Any], least: int, most: int) -> None:
    config = config_of(serve=serve)
    assert least <= sum(is_steered(config, of(number)) for number in range(1000)) <= most


def test_larger_share_steers_same_requests_and_more() -> None:
    few, more = (config_of(serve={"share": share}) for share in (0.05, 0.2))
    steered = [number for number in range(1000) if is_steered(few, of(number))]
    assert all(is_steered(more, of(number)) for number in steered)


def test_session_stays_on_one_side() -> None:
    config = config_of(serve={"share": 0.5}, route={"session_header": "x-session"})
    sides = {
        session: {is_steered(config, of(n) | {"x-session": session}) for n in range(20)}
        for session in map(str, range(50))
    }
    assert all(len(side) == 1 for side in sides.values())
    assert {True, False} == set[bool]().union(*sides.values())


@pytest.mark.parametrize("config", [config_of(serve={"share": 0.5})])
async def test_envoy_gets_destinations_of_steered_requests_alone(
    envoy: EnvoySide, services: Services
) -> None:
    for number in range(40):
        reply = await envoy.ask_body_first(CHAT, headers=of(number))
        if is_steered(services.config, of(number)):
            assert routed_to(reply)
        else:
            assert bytes(reply) == UNCHANGED["request_body"]
    counted = samples(services.metrics.requests)
    assert counted["observed",] + counted["routed",] == 40
