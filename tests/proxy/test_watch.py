"""Budgets of responses and chunks that the router reads."""

from contextlib import AsyncExitStack

import pytest

from extproc.config import Config
from extproc.proxy.services import Services
from tests.fakes import ManualClock, replica
from tests.proxy.conftest import config_of, put_replicas, samples, with_fleet
from tests.proxy.envoy_side import CHAT, EVENTS, STREAMED, EnvoySide, Stream
from tests.proxy.replies import BodyMode, HeaderMode, chosen, destination

MARK = {"x-extproc-response-skipped": "1"}
PER_S = 100
TOKENS = 20  # of a streamed response, each a chunk
CHUNKS_PER_S = 2.0
"""Six responses' chunks add up at this rate, half of them for responses that load an adapter."""
BOUNDED = STREAMED | {"min_tokens": TOKENS, "max_tokens": TOKENS}


@pytest.fixture
def config() -> Config:
    return config_of(serve={"chunks_per_s": CHUNKS_PER_S})


@pytest.fixture
def services(services: Services, clock: ManualClock) -> Services:
    return with_fleet(services, clock)


async def ask(envoy: EnvoySide, status: int = 200) -> tuple[bool, str]:
    """Sends a request; returns whether Envoy shows its response, and the replica."""
    async with envoy.stream() as stream:
        mode = (await stream.request_headers()).mode_override
        if mode is not None:
            assert mode.response_header_mode == HeaderMode.SKIP
            assert mode.request_body_mode == BodyMode.BUFFERED
        replica = destination(await stream.request_body(CHAT))[0]
        if mode is None:
            await stream.response_headers(status, upstream=replica)
        await stream.end()
    return mode is None, replica


async def test_a_hundred_responses_a_second_are_visible(
    envoy: EnvoySide, services: Services, clock: ManualClock
) -> None:
    visible = [(await ask(envoy))[0] for _ in range(PER_S + 10)]
    assert visible == [True] * PER_S + [False] * 10
    clock.advance(0.055)
    visible = [(await ask(envoy))[0] for _ in range(10)]
    assert visible == [True] * 5 + [False] * 5
    assert services.fleet.in_flight == 0
    assert {*samples(services.metrics.requests)} == {("routed",)}


async def test_failed_replica_makes_all_responses_visible(envoy: EnvoySide) -> None:
    for _ in range(PER_S - 1):
        await ask(envoy)
    visible, failed = await ask(envoy, status=503)
    assert visible
    answered = ""
    while answered != failed:
        visible, answered = await ask(envoy)
        assert visible
    assert not (await ask(envoy))[0]


async def begin(stream: Stream, model: str = "llama") -> bool:
    """Begins an answer; returns whether the router reads it."""
    first = destination(await stream.ask(BOUNDED | {"model": model}))[0]
    reply = await stream.response_headers(upstream=first, content_type=EVENTS)
    return reply.mode_override is not None


async def answer(envoy: EnvoySide, chunks: int = TOKENS, model: str = "llama") -> bool:
    async with envoy.stream() as stream:
        read = await begin(stream, model)
        for left in reversed(range(chunks if read else 0)):
            await stream.response_body(b"data: {}\n\n", end_of_stream=not left)
        await stream.end()
    return read


async def test_streams_are_read_within_chunk_budget(envoy: EnvoySide, clock: ManualClock) -> None:
    assert [await answer(envoy) for _ in range(5)] == [True] * 3 + [False] * 2
    clock.advance(TOKENS / CHUNKS_PER_S)
    assert [await answer(envoy) for _ in range(2)] == [True, False]
    clock.advance(3600.0)
    assert [await answer(envoy) for _ in range(5)] == [True] * 3 + [False] * 2


async def test_streams_that_load_an_adapter_get_second_half_of_budget(
    envoy: EnvoySide, services: Services
) -> None:
    put_replicas(services, models=("llama", "lora"), adapters=("lora",), max_loras=1)
    assert [await answer(envoy) for _ in range(4)] == [True] * 3 + [False]
    assert await answer(envoy, model="lora")


async def test_four_streams_of_unmeasured_replicas_are_read_beyond_the_budget(
    envoy: EnvoySide, services: Services
) -> None:
    put_replicas(services, started_at=800.0)
    assert [await answer(envoy) for _ in range(4)] == [True] * 3 + [False]
    put_replicas(services, started_at=900.0, measured=False)
    async with AsyncExitStack() as streams:
        begun = [await streams.enter_async_context(envoy.stream()) for _ in range(20)]
        assert sum([await begin(stream) for stream in begun]) == 2 * 4
    put_replicas(services, started_at=950.0, measured=False)
    assert await answer(envoy)
    put_replicas(services, started_at=950.0)
    assert not await answer(envoy)


async def test_short_stream_returns_unused_chunks(envoy: EnvoySide) -> None:
    assert all([await answer(envoy, chunks=2) for _ in range(20)])


async def test_long_stream_uses_up_later_budget(envoy: EnvoySide, clock: ManualClock) -> None:
    assert await answer(envoy, chunks=5 * TOKENS)
    clock.advance(2 * TOKENS / CHUNKS_PER_S)
    assert not await answer(envoy)
    clock.advance(1.0)
    assert await answer(envoy)


async def test_skipped_response_avoids_ejected_replica(
    envoy: EnvoySide, services: Services, clock: ManualClock
) -> None:
    for _ in range(3):
        services.fleet.eligibility.failed(replica(1))
    clock.advance(1.1)
    async with envoy.stream() as first, envoy.stream() as visible, envoy.stream() as last:
        assert chosen(await first.body_first(CHAT, headers=MARK)) == [replica(2)]
        assert chosen(await visible.body_first(CHAT))[0] == replica(1)
        await visible.answer(upstream=replica(1))
        assert chosen(await last.body_first(CHAT, headers=MARK))[0] == replica(1)


async def test_skipped_response_is_not_unanswered(envoy: EnvoySide, services: Services) -> None:
    assert chosen(await envoy.ask_body_first(CHAT, headers=MARK))
    assert chosen(await envoy.ask_body_first())  # the client hung up
    assert samples(services.metrics.requests) == {("routed",): 2.0, ("unanswered",): 1.0}


async def test_stored_response_is_visible_despite_the_mark(
    stream: Stream, services: Services
) -> None:
    stored = {"model": "llama", "input": "hello", "store": True}
    assert chosen(await stream.body_first(stored, "/v1/responses", headers=MARK))
    await stream.end()  # the client hung up
    assert samples(services.metrics.requests) == {("routed",): 1.0, ("unanswered",): 1.0}
