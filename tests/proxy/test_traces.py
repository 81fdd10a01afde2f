"""Spans of requests, and the collector that receives them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from extproc.observe.traces import Traces
from extproc.proxy.services import Services
from tests.fakes import ManualClock, chat, replica
from tests.proxy.conftest import put_replicas
from tests.proxy.envoy_side import CHAT, EnvoySide
from tests.proxy.replies import chosen
from tests.spans import Spans, attributes

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{CALLER}-01"


@pytest.fixture
async def spans() -> AsyncIterator[Spans]:
    async with Spans() as receiver:
        yield receiver


@pytest.fixture
def services(services: Services, spans: Spans) -> Services:
    return replace(services, traces=Traces(f"http://127.0.0.1:{spans.port}/"))


async def exported(services: Services, spans: Spans) -> dict[str, Span]:
    """All spans, by name."""
    assert services.traces is not None
    await asyncio.to_thread(services.traces.close)
    return {span.name: span for _, span in spans.all}


async def test_request_has_two_spans(envoy: EnvoySide, services: Services, spans: Spans) -> None:
    async with envoy.stream(traceparent=SAMPLED) as stream:
        reply = await stream.body_first(CHAT | {"max_tokens": 50}, headers={"x-request-id": "one"})
        (first, second) = chosen(reply)
        await stream.answer(status=503, upstream=second)
    found = await exported(services, spans)
    route, request = found["route"], found["chat llama"]
    assert {span.trace_id.hex() for span in (route, request)} == {TRACE}
    assert {span.parent_span_id.hex() for span in (route, request)} == {CALLER}
    shown = attributes(route)
    assert shown["extproc.result"] == "routed"
    assert f"{shown['server.address']}:{shown['server.port']}" == first
    assert shown["gen_ai.request.max_tokens"] == 50
    assert shown["extproc.request_id"] == "one"
    assert shown["extproc.queued_s"] == 0.0
    outcome = attributes(request)
    assert f"{outcome['server.address']}:{outcome['server.port']}" == second
    assert (outcome["http.response.status_code"], outcome["error.type"]) == (503, "503")
    assert request.status.code == request.status.STATUS_CODE_ERROR
    assert spans.all[0][0] == "extproc"


@pytest.mark.parametrize("address", ["/run/vllm.sock", "envoy://sidecar/10.0.0.9:8000"])
async def test_span_names_a_server_without_a_port(
    envoy: EnvoySide, services: Services, spans: Spans, address: str
) -> None:
    async with envoy.stream(traceparent=SAMPLED) as stream:
        await stream.body_first(CHAT)
        await stream.answer(upstream=address, attempts=1)
    assert attributes((await exported(services, spans))["chat llama"])["server.address"] == address


@pytest.mark.parametrize("traceparent", ["", "nonsense"])
async def test_missing_traceparent_starts_own_trace(
    envoy: EnvoySide, services: Services, spans: Spans, traceparent: str
) -> None:
    await envoy.ask_body_first(CHAT, traceparent=traceparent)
    assert (await exported(services, spans))["route"].parent_span_id == b""


async def test_unsampled_and_other_requests_have_no_span(
    envoy: EnvoySide, services: Services, spans: Spans
) -> None:
    await envoy.ask_body_first(CHAT, traceparent=SAMPLED.removesuffix("1") + "0")
    await envoy.ask_body_first({}, path="/v1/files", traceparent=SAMPLED)
    assert await exported(services, spans) == {}


async def test_span_shows_that_client_left(
    envoy: EnvoySide, services: Services, spans: Spans
) -> None:
    put_replicas(services, kv_tokens=42_000)
    for number in (1, 2):
        services.fleet.dispatch(replica(number), chat(25_000, 50))
    async with envoy.stream(traceparent=SAMPLED) as stream:
        long = {"role": "user", "content": "the sea " * 12_000}
        reply = await stream.body_first(CHAT | {"messages": [long], "max_tokens": 50})
        assert reply.override_message_timeout
        await stream.end()
    route = (await exported(services, spans))["route"]
    assert attributes(route)["extproc.result"] == "gave_up"
    (queued,) = route.events
    assert queued.name == "queued"
    assert attributes(queued)["why"]


async def test_spans_show_refused_and_unrouted_requests(
    envoy: EnvoySide, services: Services, spans: Spans
) -> None:
    await envoy.ask_body_first(b"[]", traceparent=SAMPLED)
    for number in (1, 2):
        services.fleet.remove(replica(number))
    await envoy.ask_body_first(CHAT, traceparent=SAMPLED)
    await exported(services, spans)
    refused, unrouted = (span for _, span in spans.all)
    assert attributes(refused)["error.type"] == "invalid_type"
    assert refused.status.code == refused.status.STATUS_CODE_ERROR
    assert [event.name for event in refused.events] == ["refused"]
    assert attributes(unrouted)["extproc.result"] == "unrouted"


@pytest.mark.slow
def test_missing_collector_does_not_delay_shutdown() -> None:
    before = {*threading.enumerate()}
    traces = Traces("http://127.0.0.1:1")
    trace = traces.begin([("traceparent", SAMPLED)])
    assert trace is not None
    trace.ended("refused")
    traces.close()
    assert {*threading.enumerate()} <= before, "nor does a thread of it try on"


async def test_failing_collector_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = ManualClock(1e9)
    monkeypatch.setattr("extproc.observe.traces.monotonic", now)
    async with Spans() as collector:
        collector.status = 401
        for minutes, lines in ((0, 1), (0, 1), (1, 2)):
            now.advance(60.0 * minutes)
            traces = Traces(f"http://127.0.0.1:{collector.port}")
            for _ in range(2):
                trace = traces.begin([("traceparent", SAMPLED)])
                assert trace is not None
                trace.ended("refused")
            await asyncio.to_thread(traces.close)
            assert len(caplog.records) == lines
    assert all("401" in record.getMessage() for record in caplog.records)
