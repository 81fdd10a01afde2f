import asyncio
import gc
import json
from typing import Any

import grpc
import pytest
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as BodyMode,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeHeaderSendMode as HeaderMode,
)
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingResponse
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec import to_builtins

from extproc.config import Config
from extproc.predict.completion import Prediction
from extproc.proxy.service import SERVICE, GrpcServer
from extproc.proxy.services import Services
from tests.conftest import Logged
from tests.fakes import ManualClock, replica, state
from tests.proxy.conftest import put_replicas, router_of, samples
from tests.proxy.envoy_side import CHAT, EnvoySide, connected
from tests.proxy.replies import destination, error_of, status_of
from tests.waiting import PATIENCE_S, until

MEMBERS = {replica(1), replica(2)}
ANSWER = {"choices": [], "usage": {"prompt_tokens": 75, "completion_tokens": 33}}


async def sent_to(envoy: EnvoySide, body: dict[str, Any]) -> set[str]:
    """The replicas that a request may be served by."""
    return set(destination(await envoy.ask(body)))


async def test_request_is_routed_and_outcome_logged(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as stream:
        reply = await stream.request_headers(headers={"x-request-id": "abc"})
        assert reply.request_headers is not None
        assert destination(reply) == []

        reply = await stream.request_body(CHAT)
        assert set(destination(reply)) == MEMBERS
        assert services.fleet.in_flight == 1
        first = destination(reply)[0]

        reply = await stream.response_headers(upstream=first)
        assert reply.mode_override is not None
        assert reply.mode_override.response_body_mode == BodyMode.STREAMED
        assert (await stream.response_body(ANSWER)).response_body is not None
        await stream.end()

    assert services.fleet.in_flight == 0
    (record,) = services.log.of_request("abc")
    shown = to_builtins(record.record())
    assert shown["replica"] == shown["outcome"]["served_by"] == first
    assert shown["outcome"]["status"] == 200
    assert shown["outcome"]["output_tokens"] == 33
    assert shown["outcome"]["completion_s"] > 0
    assert {candidate["replica"] for candidate in shown["candidates"]} == MEMBERS
    json.dumps(shown, allow_nan=False)


async def test_repeated_headers_are_counted_once(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as stream:
        for _ in range(2):
            await stream.request_headers(headers={"content-encoding": "gzip"})
        assert services.fleet.in_flight == 1
        await stream.end()
    assert services.fleet.in_flight == 0


async def test_usage_teaches_bytes_per_token(envoy: EnvoySide, services: Services) -> None:
    before = services.tokens.bytes_per_token("llama")
    for _ in range(20):
        await envoy.converse(CHAT, {"usage": {"prompt_tokens": 300, "completion_tokens": 5}})
    assert services.tokens.bytes_per_token("llama") < before / 2


async def test_streamed_response_shows_first_token(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as stream:
        await stream.ask(CHAT | {"stream": True}, headers={"x-request-id": "s"})
        await stream.response_headers(content_type="text/event-stream; charset=utf-8")
        await stream.response_body(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', False)
        await stream.response_body(b"data: [DONE]\n\n")
        await stream.end()
    (record,) = services.log.of_request("s")
    assert record.outcome.ttft_s is not None
    assert record.outcome.completion_s is not None
    assert record.outcome.ttft_s <= record.outcome.completion_s


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("POST", "/tokenize"),
        ("GET", "/v1/chat/completions"),
    ],
)
async def test_other_endpoint_passes_untouched(
    envoy: EnvoySide, services: Services, method: str, path: str
) -> None:
    async with envoy.stream() as stream:
        reply = await stream.request_headers(path, method)
        assert destination(reply) == []
        assert reply.mode_override is not None
        assert reply.mode_override.request_body_mode == BodyMode.NONE
        assert reply.mode_override.response_header_mode == HeaderMode.SKIP
        # An Envoy that allows no mode override sends the rest all the same.
        assert destination(await stream.request_body(b"anything")) == []
        assert (await stream.response_headers()).mode_override is None
        await stream.end()
    assert services.log.after(0) == []


@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b'{"model": 5}', b"[" * 10_000, b'{"model": "\xff"}']
)
async def test_invalid_body_answers_400(envoy: EnvoySide, services: Services, body: bytes) -> None:
    reply = await envoy.ask(body)
    assert status_of(reply) == 400
    error = error_of(reply)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert services.fleet.in_flight == 0


async def test_missing_model_means_the_only_one(envoy: EnvoySide, services: Services) -> None:
    assert await sent_to(envoy, {"messages": []}) == MEMBERS
    assert services.log.last(1)[0].decision.profile.model == "llama"


async def test_missing_model_among_several_is_routed(envoy: EnvoySide, services: Services) -> None:
    put_replicas(services, 2, models=("other",))
    assert await sent_to(envoy, {"messages": []}) == MEMBERS
    assert services.log.last(1)[0].decision.profile.model == ""


async def test_post_without_body_is_refused(envoy: EnvoySide) -> None:
    async with envoy.stream() as stream:
        reply = await stream.request_headers(end_of_stream=True)
        assert reply.immediate_response is not None


@pytest.mark.parametrize("bound", [-1, 1e30, "many", None, True, float("nan"), 10**400])
async def test_absurd_max_tokens_is_routed(
    envoy: EnvoySide, services: Services, bound: Any
) -> None:
    reply = await envoy.ask(CHAT | {"max_tokens": bound})
    assert set(destination(reply)) == MEMBERS
    assert services.fleet.in_flight == 0


@pytest.mark.parametrize("phases", range(4))
async def test_reset_in_any_phase_leaks_nothing(
    envoy: EnvoySide, services: Services, phases: int
) -> None:
    async with envoy.stream() as stream:
        await stream.request_headers()
        if phases > 0:
            await stream.request_body(CHAT)
        if phases > 1:
            await stream.response_headers()
        if phases > 2:
            await stream.response_body(b"{", end_of_stream=False)
        stream.reset()
    await until(lambda: services.fleet.in_flight == 0)
    await until(lambda: samples(services.metrics.open_streams) == {(): 0})
    view = services.fleet.view("llama")
    assert view.backlog.tolist() == pytest.approx([0, 0], abs=1e-6)


async def test_response_may_precede_request(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as stream:
        assert (await stream.response_headers()).response_headers is not None
        assert (await stream.response_body(b"x")).response_body is not None
        assert (await stream.response_trailers()).response_trailers is not None
        assert (await stream.request_trailers()).request_trailers is not None
        assert bytes(await stream.send_bytes(b"")) == b""  # a phase of a later version
        assert (await stream.request_body(CHAT)).request_body is not None
        assert (await stream.request_headers()).request_headers is not None
        assert set(destination(await stream.request_body(CHAT))) == MEMBERS
        assert destination(await stream.request_body(CHAT)) == []
        await stream.end()
    assert services.fleet.in_flight == 0


async def test_retry_moves_request_to_serving_replica(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as stream:
        first, second = destination(await stream.ask())
        assert services.fleet.in_flight_on(first) == 1
        await stream.response_headers(upstream=second)
        assert services.fleet.in_flight_on(second) == 1
        assert services.fleet.in_flight_on(first) == 0
        await stream.end()


async def test_failing_replica_is_ejected(envoy: EnvoySide, services: Services) -> None:
    bad, good = replica(1), replica(2)
    for _ in range(3):
        await envoy.converse(status=500, upstream=bad)
    for _ in range(10):
        assert destination(await envoy.ask()) == [good]


async def test_header_selects_policy(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as stream:
        await stream.ask(CHAT, headers={"x-extproc-policy": "round_robin"})
        assert services.log.after(0)[-1].decision.policy == "round_robin"


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
async def test_headers_alone_route_by_content_length(
    envoy: EnvoySide, services: Services, mode: BodyMode
) -> None:
    async with envoy.stream() as stream:
        reply = await stream.request_headers(body_mode=mode, headers={"content-length": "4000"})
        assert set(destination(reply)) == MEMBERS
        assert services.log.after(0)[-1].decision.profile.prompt_tokens == pytest.approx(1000)
        assert (await stream.request_body(b"{}")).request_body is not None


async def test_compressed_body_is_routed_by_length(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as stream:
        reply = await stream.request_headers(
            headers={"content-encoding": "gzip", "content-length": "400"}
        )
        assert set(destination(reply)) == MEMBERS
        assert destination(await stream.request_body(b"\x1f\x8b")) == []


async def test_truncated_body_counts_full_length(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as stream:
        await stream.request_headers(
            body_mode=BodyMode.BUFFERED_PARTIAL, headers={"content-length": "40000"}
        )
        start = json.dumps(CHAT).encode()[:-20]
        assert set(destination(await stream.request_body(start, end_of_stream=False))) == MEMBERS
        assert services.log.after(0)[-1].decision.profile.prompt_tokens > 9000


async def test_without_healthy_replica_envoy_chooses(envoy: EnvoySide, services: Services) -> None:
    put_replicas(services, healthy=False)
    async with envoy.stream() as stream:
        assert destination(await stream.ask()) == []
        await stream.answer(status=503)


async def test_reply_keeps_route_cache(envoy: EnvoySide) -> None:
    reply = await envoy.ask()
    assert reply.request_body is not None
    assert reply.request_body.response is not None
    assert not reply.request_body.response.clear_route_cache


async def test_invalid_message_ends_only_its_stream(services: Services) -> None:
    server = GrpcServer(services)
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(f"/{SERVICE}/Process")()
        await call.write(b"\xff\xff\xff")
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        async with EnvoySide(channel).stream() as stream:
            assert set(destination(await stream.ask())) == MEMBERS
    await server.stop(0)


async def test_drain_waits_for_open_streams(services: Services) -> None:
    server = GrpcServer(services)
    port = await server.start("127.0.0.1:0")
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        EnvoySide(channel).stream() as stream,
    ):
        check = health_pb2_grpc.HealthStub(channel).Check

        async def serving(service: str) -> bool:
            answer = await check(health_pb2.HealthCheckRequest(service=service))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        names = ("", SERVICE, "readiness", "liveness")
        assert all([await serving(name) for name in names])
        await stream.ask()
        stopping = asyncio.create_task(server.stop(drain_s=30))
        await asyncio.sleep(0)
        assert [name for name in names if await serving(name)] == ["liveness"]
        await stream.response_headers()
        await stream.response_body(ANSWER)
        assert not stopping.done()
        await stream.end()
        await asyncio.wait_for(stopping, PATIENCE_S)
    assert services.fleet.in_flight == 0


async def test_drain_ends_after_drain_s(services: Services, logged: Logged) -> None:
    server = GrpcServer(services)
    port = await server.start("127.0.0.1:0")
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        EnvoySide(channel).stream() as stream,
    ):
        await stream.ask()
        await asyncio.wait_for(server.stop(drain_s=0.05), PATIENCE_S)
        await until(lambda: services.fleet.in_flight == 0)
    assert not logged.lines()


async def test_taken_port_is_named(services: Services) -> None:
    first, second = GrpcServer(services), GrpcServer(services)
    port = await first.start("127.0.0.1:0")
    with pytest.raises(OSError, match=f"127.0.0.1:{port} .*serve.listen"):
        await second.start(f"127.0.0.1:{port}")
    await first.stop(0)


async def test_broken_response_has_no_completion(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as stream:
        await stream.ask(CHAT, headers={"x-request-id": "broken"})
        await stream.response_headers()
        await stream.response_body(b'{"choices": [', end_of_stream=False)
        await stream.end()
    (record,) = services.log.of_request("broken")
    assert record.outcome.status == 200
    assert record.outcome.completion_s is None


async def test_replica_envoy_skips_is_excluded(envoy: EnvoySide, services: Services) -> None:
    for _ in range(30):
        await envoy.converse(upstream=replica(2))
    assert services.fleet.view("llama").ids == [replica(2)]


async def test_compressed_body_without_replica_passes(envoy: EnvoySide, services: Services) -> None:
    put_replicas(services, healthy=False)
    reply = await envoy.ask(b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert reply.immediate_response is None
    assert destination(reply) == []


async def test_request_in_flight_keeps_no_candidates() -> None:
    """Of a thousand they would be 0.3 MB for each of thousands of requests in flight."""
    config = Config.model_validate({"serve": {"decisions_kept": 0}})
    services = router_of(config, 1)
    gc.collect()
    before = _predictions()
    async with connected(services) as envoy, envoy.stream() as stream:
        assert destination(await stream.ask())
        gc.collect()
        assert services.fleet.in_flight == 1
        assert _predictions() == before


def _predictions() -> int:
    return sum(isinstance(one, Prediction) for one in gc.get_objects())


async def test_large_body_stays_with_envoy(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as stream:
        reply = await stream.request_headers(headers={"content-length": str(40 * 2**20)})
        assert set(destination(reply)) == MEMBERS
        assert reply.mode_override is not None
        assert reply.mode_override.request_body_mode == BodyMode.NONE
        assert reply.mode_override.response_header_mode == HeaderMode.DEFAULT
        (record,) = services.log.after(0)
        assert record.decision.profile.model == "llama"
        assert record.decision.profile.prompt_tokens == 40 * 576
        # An Envoy that allows no mode override sends it all the same.
        assert destination(await stream.request_body(b"{")) == []
        await stream.answer()


async def test_large_body_is_read_to_choose_model(envoy: EnvoySide, services: Services) -> None:
    put_replicas(services, 2, models=("other",))
    async with envoy.stream() as stream:
        reply = await stream.request_headers(headers={"content-length": str(40 * 2**20)})
        assert destination(reply) == []
        reply = await stream.request_body(CHAT | {"model": "other"})
        assert set(destination(reply)) == {replica(2)}  # once more there rather than on any


async def test_stream_metadata_selects_pool(services: Services, logged: Logged) -> None:
    second = services.of_pool(services.config.model_copy(update={"pool": "second"}))
    second.fleet.put(state(7, "llama-8b-a10", ManualClock(services.wall())))
    sent = {}
    async with connected(services, {"second": second}) as envoy:
        for pool in ("", "default", "second", "lost", "lost"):
            async with envoy.stream(pool) as stream:
                sent[pool] = set(destination(await stream.ask()))
                await stream.answer()
    assert sent == {"": MEMBERS, "default": MEMBERS, "second": {replica(7)}, "lost": set()}
    assert [record.pool for record in services.log.last(9)] == ["default", "default", "second"]
    assert (services.fleet.in_flight, second.fleet.in_flight) == (0, 0)
    (line,) = logged.lines()
    assert (line["pool"], line["configured"]) == ("lost", "default, second")


async def test_usage_teaches_image_tokens(envoy: EnvoySide, services: Services) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    body = {"model": "llama", "messages": [{"role": "user", "content": [image, image]}]}
    for _ in range(50):
        await envoy.converse(body, {"usage": {"prompt_tokens": 3_009, "completion_tokens": 1}})
    assert services.tokens.image_tokens("llama") == pytest.approx(1_500, rel=0.05)
    assert services.tokens.image_tokens("other") == services.config.request.image_tokens
    assert services.tokens.bytes_per_token("llama") == services.config.request.bytes_per_token


RESPONSES = "/v1/responses"
ASKED = {"model": "llama", "input": "Tell me of the sea."}


@pytest.fixture
def unread(config: Config) -> Config:
    """No stream is read that need not be."""
    return config.model_copy(
        update={"serve": config.serve.model_copy(update={"chunks_per_s": 0.0})}
    )


async def respond(
    envoy: EnvoySide, upstream: str, body: dict[str, Any], number: int = 1, streamed: bool = False
) -> BodyMode | None:
    """A response passes; returns whether its body was asked for."""
    async with envoy.stream() as stream:
        reply = await stream.request_headers(RESPONSES)
        assert reply.mode_override is None  # Envoy is to tell of the response
        await stream.request_body(ASKED | body)
        kind = "text/event-stream" if streamed else "application/json"
        reply = await stream.response_headers(upstream=upstream, content_type=kind)
        asked = None if reply.mode_override is None else reply.mode_override.response_body_mode
        whole = json.dumps({"id": f"resp_{number}", "output": []}).encode()
        created = b'event: response.created\ndata: {"response":' + whole + b"}\n\n"
        if asked is not None:
            await stream.response_body(created if streamed else whole)
        await stream.end()
    return asked


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("second", [False, True])
async def test_stored_response_continues_on_its_owner(
    envoy: EnvoySide, services: Services, streamed: bool, second: bool
) -> None:
    """Whoever was chosen: Envoy may have tried that one in vain."""
    served = replica(2 if second else 1)
    await respond(envoy, served, {"stream": streamed}, streamed=streamed)
    for _ in range(5):
        reply = await envoy.ask(ASKED | {"previous_response_id": "resp_1"}, RESPONSES)
        assert destination(reply) == [served]
    for method, path in (("GET", "/resp_1"), ("POST", "/resp_1/cancel"), ("GET", "/resp_1?a=b")):
        async with envoy.stream() as stream:
            reply = await stream.request_headers(RESPONSES + path, method)
            assert destination(reply) == [served]
            assert reply.mode_override is not None
            assert reply.mode_override.request_body_mode == BodyMode.NONE
            await stream.answer()
    assert services.fleet.in_flight == 0


async def test_unknown_stored_response_goes_anywhere(envoy: EnvoySide) -> None:
    async with envoy.stream() as stream:
        assert destination(await stream.request_headers(f"{RESPONSES}/resp_9", "GET")) == []


async def test_stored_streams_are_read_for_response_ids(unread: Config) -> None:
    services = router_of(unread)
    async with connected(services) as envoy:
        while services.watch.sees(services.clock(), doubtful=False):
            pass  # of other responses nothing is looked at for now
        for number in range(5):
            asked = await respond(envoy, replica(1), {"stream": True}, number, streamed=True)
            assert asked is BodyMode.STREAMED
        held = [services.fleet.holder(f"resp_{number}") for number in range(5)]
        assert held == [replica(1)] * 5
        not_kept = {"stream": True, "store": False}
        assert await respond(envoy, replica(1), not_kept, 200, streamed=True) is None
        assert services.fleet.holder("resp_200") is None


async def test_background_response_has_no_completion(envoy: EnvoySide, services: Services) -> None:
    await respond(envoy, replica(1), {"background": True})
    (record,) = services.log.last(9)
    assert record.outcome.status == 200
    assert record.outcome.completion_s is None
    assert services.fleet.holder("resp_1") == replica(1)


def refused(reply: ProcessingResponse) -> tuple[int, dict[str, Any]]:
    assert reply.immediate_response is not None
    assert reply.immediate_response.status is not None
    error = error_of(reply)
    return int(reply.immediate_response.status.code), error


@pytest.mark.parametrize("healthy", [True, False])
async def test_unlisted_model_answers_404(
    envoy: EnvoySide, services: Services, healthy: bool
) -> None:
    clock = ManualClock(services.wall())
    for number in range(3, 100):
        served = (f"model-{number:02}",)
        services.fleet.put(state(number, "llama-8b-a10", clock, models=served, healthy=healthy))
    status, error = refused(await envoy.ask(CHAT | {"model": "none"}))
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "`none`" in error["message"]
    assert "`llama`, `model-03`" in error["message"]
    assert error["message"].endswith(" and 48 more.")


async def test_refusals_are_counted_by_reason(envoy: EnvoySide, services: Services) -> None:
    clock = ManualClock(services.wall())
    services.fleet.put(state(3, "llama-8b-a10", clock, models=("down",), healthy=False))
    for body in (b"no json", b'{"model": 5}', CHAT | {"model": "none"}, CHAT | {"model": "down"}):
        async with envoy.stream() as stream:
            status, error = refused(await stream.ask(body))
            (*_, reason) = samples(services.metrics.refused)
            assert reason == (error["code"] or error["type"],), status
    assert samples(services.metrics.refused) == {
        ("invalid_json",): 1,
        ("invalid_model",): 1,
        ("model_not_found",): 1,
        ("service_unavailable_error",): 1,
    }
    assert samples(services.metrics.requests) == {("refused",): 4}


@pytest.mark.parametrize("figures", [{"models": ()}, {"listed": False}])
async def test_replica_without_model_list_may_serve_any(
    envoy: EnvoySide, services: Services, figures: dict[str, Any]
) -> None:
    """``/metrics`` names one; of adapters and further names ``/v1/models`` tells."""
    put_replicas(services, 2, **figures)
    assert await sent_to(envoy, CHAT | {"model": "none"}) <= MEMBERS


async def test_no_model_is_unknown_before_all_replicas_are(
    envoy: EnvoySide, services: Services
) -> None:
    services.fleet.known.clear()
    assert await sent_to(envoy, CHAT | {"model": "none"}) <= MEMBERS


async def test_listed_models_only_false_routes_any_model() -> None:
    lenient = Config.model_validate({"route": {"listed_models_only": False}})
    services = router_of(lenient, 1)
    async with connected(services) as envoy, envoy.stream() as stream:
        assert destination(await stream.ask(CHAT | {"model": "an adapter"}))
        await stream.end()


async def test_session_follows_serving_replica_without_its_id() -> None:
    config = Config.model_validate({"route": {"session_header": "X-Session", "seed": 1}})
    services = router_of(config)
    async with connected(services) as envoy:
        home = ""
        for _ in range(6):
            async with envoy.stream() as stream:
                first, second = destination(await stream.ask(CHAT, headers={"x-session": "secret"}))
                assert first == (home or first)
                home = second  # Envoy tried the first in vain
                await stream.answer(ANSWER, upstream=second)
    told = await services.fleet.sessions.untold(100)
    assert [replica for _, replica in told][-1] == home
    assert "secret" not in str(told)
