import gc

import pytest
from prometheus_client.registry import Collector

from extproc.config import Config
from extproc.predict.completion import Prediction
from extproc.proxy.services import Services
from tests.conftest import Logged
from tests.fakes import ManualClock, chat, fleet_of, replica, state
from tests.proxy.conftest import config_of, on_fleet, put_replicas, router_of
from tests.proxy.envoy_side import CHAT, EnvoySide, Local, Stream
from tests.proxy.replies import MEMBERS, destination

ANSWER = {"choices": [], "usage": {"prompt_tokens": 75, "completion_tokens": 33}}
TUNNEL = "127.0.0.1:15001"


@pytest.fixture
def config() -> Config:
    return config_of(route={"seed": 1}, serve={"chunks_per_s": 0.0})


@pytest.fixture
def services(services: Services, clock: ManualClock) -> Services:
    fleet = fleet_of(clock, "llama-8b-a10", "llama-8b-a10")
    fleet.members_known.set()
    return on_fleet(services, fleet, clock=clock)


read_all = pytest.mark.parametrize(
    "config", [config_of(route={"seed": 1}, serve={"chunks_per_s": 1e6})]
)


def count(metric: Collector) -> float:
    (family,) = metric.collect()
    return next(one.value for one in family.samples if one.name.endswith("_count"))


async def test_tunnel_means_chosen_replica_served(envoy: EnvoySide, services: Services) -> None:
    for number in range(3):
        async with envoy.stream() as stream:
            first = destination(await stream.ask(CHAT, headers={"x-request-id": str(number)}))[0]
            await stream.response_headers(upstream=TUNNEL)
            assert services.fleet.in_flight_on(first) == 1
            await stream.end()
        (record,) = services.log.of_request(str(number))
        assert record.outcome.served_by == first
    assert not services.fleet.eligibility.has_suspects
    assert set(services.fleet.view("llama").ids) == {replica(1), replica(2)}


async def test_tunnel_failure_counts_for_chosen(envoy: EnvoySide, services: Services) -> None:
    for _ in range(5):  # three of one of the two
        await envoy.converse(status=500, upstream=TUNNEL)
    (excluded,) = services.fleet.view("llama").excluded
    assert excluded.why == "ejected: 3 or more consecutive requests failed"


@pytest.mark.parametrize(
    ("status", "tried_again", "polled", "learned"),
    [
        (200, False, True, True),
        (200, False, False, False),
        (200, True, True, False),
        (500, False, True, False),
        (None, False, True, False),
    ],
)
async def test_unread_stream_teaches_output_length(
    envoy: EnvoySide,
    services: Services,
    clock: ManualClock,
    status: int | None,
    tried_again: bool,
    polled: bool,
    learned: bool,
) -> None:
    """Where its replica's steps were counted meanwhile, and all of them were its own."""
    steps = 0.0
    for number in (1, 2):  # none is alone
        services.fleet.dispatch(replica(number), chat(100, 10_000))
    before = services.fleet.lengths.expected(0, 10_000.0)
    for _ in range(5):
        async with envoy.stream() as stream:
            first, second = destination(await stream.ask(CHAT | {"stream": True}))
            if status is not None:
                kind, server = "text/event-stream", second if tried_again else first
                await stream.response_headers(status, upstream=server, content_type=kind)
            for _ in range(60):
                clock.advance(1.0)
                steps += 30.0
                for number in (1, 2) if polled else ():
                    services.fleet.put(state(number, "llama-8b-a10", clock, running=2, steps=steps))
            await stream.end()
    expected = services.fleet.lengths.expected(0, 10_000.0)
    assert expected > 2 * before if learned else expected == before


@read_all
async def test_hang_up_teaches_nothing(
    stream: Stream, services: Services, clock: ManualClock
) -> None:
    for number in (1, 2):
        services.fleet.dispatch(replica(number), chat(100, 10_000))
    before = services.fleet.lengths.expected(0, 10_000.0)
    first = destination(await stream.ask(CHAT | {"stream": True}))[0]
    await stream.response_headers(upstream=first, content_type="text/event-stream")
    await stream.response_body(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', False)
    clock.advance(1.0)
    for number in (1, 2):
        services.fleet.put(state(number, "llama-8b-a10", clock, running=2, steps=30.0))
    await stream.end()
    assert services.fleet.lengths.expected(0, 10_000.0) == before


@read_all
async def test_stream_without_usage_teaches_completion_error(
    envoy: EnvoySide, services: Services, clock: ManualClock
) -> None:
    for _ in range(5):
        async with envoy.stream() as stream:
            first = destination(await stream.ask(CHAT | {"stream": True}))[0]
            await stream.response_headers(upstream=first, content_type="text/event-stream")
            clock.advance(500.0)
            for number in (1, 2):
                services.fleet.put(state(number, "llama-8b-a10", clock))
            await stream.response_body(b"data: [DONE]\n\n", True)
            await stream.end()
    assert services.router.margins.completion.ratio > 1.1


async def test_unread_stream_has_no_completion_time(stream: Stream, services: Services) -> None:
    """Envoy closes its stream alike when a response has ended and when a client hung up."""
    await stream.ask(CHAT | {"stream": True}, headers={"x-request-id": "s"})
    reply = await stream.response_headers(content_type="text/event-stream")
    assert reply.mode_override is None
    await stream.end()
    (record,) = services.log.of_request("s")
    assert record.outcome.status == 200
    assert record.outcome.completion_s is None
    assert count(services.metrics.prediction_error) == 0
    assert services.fleet.in_flight == 0


@pytest.mark.parametrize("retried", [False, True])
async def test_accuracy_keeps_outcomes_of_chosen_replica(
    stream: Stream, services: Services, clock: ManualClock, retried: bool
) -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 32}}
    first, second = destination(await stream.ask(CHAT, headers={"x-request-id": "one"}))
    await stream.response_headers(upstream=second if retried else first)
    clock.advance(1.5)
    usage = {"prompt_tokens": 100, "completion_tokens": 50} | details
    await stream.response_body({"usage": usage})
    await stream.end()
    kept = [*services.accuracy.since(0.0)]
    if retried:
        assert kept == []
        return
    (record,) = services.log.of_request("one")
    predicted = record.decision.predicted_completion
    assert [(one.replica, one.predicted_s, one.actual_s, one.cached) for one in kept] == [
        (first, predicted, 1.5, 32)
    ]
    assert [*services.accuracy.since(clock() + 1.0)] == []


async def test_sequences_report_no_cached_tokens(stream: Stream, services: Services) -> None:
    first, _ = destination(await stream.ask(CHAT | {"n": 2}))
    await stream.response_headers(upstream=first)
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    usage = {"prompt_tokens": 100, "completion_tokens": 50} | details
    await stream.response_body({"usage": usage})
    await stream.end()
    assert [one.cached for one in services.accuracy.since(0.0)] == [None]


@read_all
async def test_usage_teaches_bytes_per_token(envoy: EnvoySide, services: Services) -> None:
    before = services.tokens.bytes_per_token("llama")
    for _ in range(20):
        await envoy.converse(CHAT, {"usage": {"prompt_tokens": 300, "completion_tokens": 5}})
    assert services.tokens.bytes_per_token("llama") < before / 2


@read_all
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


@read_all
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


@read_all
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
    told = await services.fleet.sessions.take_announcements(100)
    assert [replica for _, replica in told][-1] == home
    assert "secret" not in str(told)
