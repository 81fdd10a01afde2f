import gc
import json
from typing import Any

import pytest
from msgspec import to_builtins

from extproc.predict.completion import Prediction
from extproc.proxy.services import Services
from tests.conftest import Logged
from tests.fakes import replica
from tests.proxy.conftest import config_of, put_replicas, router_of
from tests.proxy.envoy_side import CHAT, EnvoySide, Stream, connected
from tests.proxy.replies import MEMBERS, BodyMode, HeaderMode, destination, mode_of

ANSWER = {"choices": [], "usage": {"prompt_tokens": 75, "completion_tokens": 33}}


async def test_request_is_routed_and_outcome_logged(stream: Stream, services: Services) -> None:
    reply = await stream.request_headers(headers={"x-request-id": "abc"})
    assert reply.request_headers is not None
    assert destination(reply) == []

    reply = await stream.request_body(CHAT)
    assert set(destination(reply)) == MEMBERS
    assert services.fleet.in_flight == 1
    first = destination(reply)[0]

    reply = await stream.response_headers(upstream=first)
    assert mode_of(reply).response_body_mode == BodyMode.STREAMED
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


async def test_usage_teaches_bytes_per_token(envoy: EnvoySide, services: Services) -> None:
    before = services.tokens.bytes_per_token("llama")
    for _ in range(20):
        await envoy.converse(CHAT, {"usage": {"prompt_tokens": 300, "completion_tokens": 5}})
    assert services.tokens.bytes_per_token("llama") < before / 2


async def test_streamed_response_shows_first_token(envoy: EnvoySide, services: Services) -> None:
    chunks = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', b"data: [DONE]\n\n"
    kind, headers = "text/event-stream; charset=utf-8", {"x-request-id": "s"}
    await envoy.converse(CHAT | {"stream": True}, *chunks, content_type=kind, headers=headers)
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
async def test_other_path_passes(
    stream: Stream, services: Services, method: str, path: str
) -> None:
    reply = await stream.request_headers(path, method)
    assert destination(reply) == []
    assert mode_of(reply).request_body_mode == BodyMode.NONE
    assert mode_of(reply).response_header_mode == HeaderMode.SKIP
    # An Envoy that allows no mode override sends the rest all the same.
    assert destination(await stream.request_body(b"anything")) == []
    assert (await stream.response_headers()).mode_override is None
    await stream.end()
    assert services.log.after(0) == []


@pytest.mark.parametrize("bound", [-1, 1e30, "many", None, True, float("nan"), 10**400])
async def test_absurd_bound_is_routed(envoy: EnvoySide, services: Services, bound: Any) -> None:
    reply = await envoy.ask(CHAT | {"max_tokens": bound})
    assert set(destination(reply)) == MEMBERS
    assert services.fleet.in_flight == 0


async def test_retry_moves_request_to_serving_replica(stream: Stream, services: Services) -> None:
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
    await envoy.ask(headers={"x-extproc-policy": "round_robin"})
    assert services.log.after(0)[-1].decision.policy == "round_robin"


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
async def test_headers_route_by_length(stream: Stream, services: Services, mode: BodyMode) -> None:
    reply = await stream.request_headers(body_mode=mode, headers={"content-length": "4000"})
    assert set(destination(reply)) == MEMBERS
    assert services.log.after(0)[-1].decision.profile.prompt_tokens == pytest.approx(1000)
    assert (await stream.request_body(b"{}")).request_body is not None


async def test_compressed_body_is_routed_by_length(stream: Stream, services: Services) -> None:
    reply = await stream.request_headers(
        headers={"content-encoding": "gzip", "content-length": "400"}
    )
    assert set(destination(reply)) == MEMBERS
    assert destination(await stream.request_body(b"\x1f\x8b")) == []


async def test_truncated_body_counts_full_length(stream: Stream, services: Services) -> None:
    await stream.request_headers(
        body_mode=BodyMode.BUFFERED_PARTIAL, headers={"content-length": "40000"}
    )
    start = json.dumps(CHAT).encode()[:-20]
    assert set(destination(await stream.request_body(start, end_of_stream=False))) == MEMBERS
    assert services.log.after(0)[-1].decision.profile.prompt_tokens > 9000


async def test_without_healthy_replica_envoy_chooses(envoy: EnvoySide, services: Services) -> None:
    put_replicas(services, healthy=False)
    assert destination(await envoy.converse(status=503)) == []


async def test_reply_keeps_route_cache(envoy: EnvoySide) -> None:
    reply = await envoy.ask()
    assert reply.request_body is not None
    assert reply.request_body.response is not None
    assert not reply.request_body.response.clear_route_cache


async def test_broken_response_has_no_completion(stream: Stream, services: Services) -> None:
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
    config = config_of(serve={"decisions_kept": 0})
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


async def test_large_body_stays_with_envoy(stream: Stream, services: Services) -> None:
    reply = await stream.request_headers(headers={"content-length": str(40 * 2**20)})
    assert set(destination(reply)) == MEMBERS
    assert mode_of(reply).request_body_mode == BodyMode.NONE
    assert mode_of(reply).response_header_mode == HeaderMode.DEFAULT
    (record,) = services.log.after(0)
    assert record.decision.profile.model == "llama"
    assert record.decision.profile.prompt_tokens == 40 * 576
    # An Envoy that allows no mode override sends it all the same.
    assert destination(await stream.request_body(b"{")) == []
    await stream.answer()


async def test_large_body_is_read_to_choose_model(stream: Stream, services: Services) -> None:
    put_replicas(services, 2, models=("other",))
    reply = await stream.request_headers(headers={"content-length": str(40 * 2**20)})
    assert destination(reply) == []
    reply = await stream.request_body(CHAT | {"model": "other"})
    assert set(destination(reply)) == {replica(2)}  # once more there rather than on any


async def test_stream_metadata_selects_pool(services: Services, logged: Logged) -> None:
    second = services.of_pool(services.config.model_copy(update={"pool": "second"}))
    put_replicas(second, 7)
    sent = {}
    async with connected(services, {"second": second}) as envoy:
        for pool in ("", "default", "second", "lost", "lost"):
            sent[pool] = set(destination(await envoy.converse(pool=pool)))
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


async def test_session_follows_serving_replica_without_its_id() -> None:
    config = config_of(route={"session_header": "X-Session", "seed": 1})
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
