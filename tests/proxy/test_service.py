import gc

import pytest

from extproc.predict.completion import Prediction
from extproc.proxy.services import Services
from tests.conftest import Logged
from tests.fakes import replica
from tests.proxy.conftest import config_of, put_replicas, router_of
from tests.proxy.envoy_side import CHAT, EnvoySide, Local, Stream
from tests.proxy.replies import MEMBERS, destination

ANSWER = {"choices": [], "usage": {"prompt_tokens": 75, "completion_tokens": 33}}


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


async def test_failing_replica_is_ejected(envoy: EnvoySide, services: Services) -> None:
    bad, good = replica(1), replica(2)
    for _ in range(3):
        await envoy.converse(status=500, upstream=bad)
    for _ in range(10):
        assert destination(await envoy.ask()) == [good]


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


async def test_request_in_flight_keeps_no_candidates() -> None:
    """Of a thousand they would be 0.3 MB for each of thousands of requests in flight."""
    config = config_of(serve={"decisions_kept": 0})
    services = router_of(config, 1)
    gc.collect()
    before = _predictions()
    async with EnvoySide(Local(services)).stream() as stream:
        assert destination(await stream.ask())
        gc.collect()
        assert services.fleet.in_flight == 1
        assert _predictions() == before


def _predictions() -> int:
    return sum(isinstance(one, Prediction) for one in gc.get_objects())


async def test_stream_metadata_selects_pool(services: Services, logged: Logged) -> None:
    second = services.of_pool(services.config.model_copy(update={"pool": "second"}))
    put_replicas(second, 7)
    sent = {}
    envoy = EnvoySide(Local(services, {"second": second}))
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
    envoy = EnvoySide(Local(services))
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
