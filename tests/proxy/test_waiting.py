"""Requests that wait at the router while replicas are full or gone."""

import asyncio
import gc
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingResponse

from extproc.config import Config
from extproc.proxy.app import dispatch_queued
from extproc.proxy.body_memory import BODY_MEMORY_BYTES
from extproc.proxy.proto.ext_proc_pb2 import ProcessingRequest
from extproc.proxy.services import Services
from extproc.route.decision import Decision
from extproc.route.queue import Queue
from extproc.route.waiting import Waiting
from tests.fakes import ManualClock, chat, replica
from tests.proxy.conftest import alive, config_of, put_replicas, samples, traced, with_fleet
from tests.proxy.envoy_side import CHAT, EnvoySide, Stream, body_first
from tests.proxy.replies import (
    MEMBERS,
    body_of,
    chosen,
    chunk_of,
    destination,
    error_of,
    refusal_header,
    status_of,
)
from tests.proxy.test_housekeeping import one_pass
from tests.waiting import until

Full = tuple[Stream, Stream]


async def wait_in_full_duplex(stream: Stream, services: Services) -> None:
    await stream.write_headers()
    await stream.write_body(json.dumps(long("third")).encode())
    await until(lambda: len(services.queue) == 1)


@pytest.fixture
def config(request: pytest.FixtureRequest) -> Config:
    return config_of(
        route={"models": {"chat": "llama"}, "seed": 1},
        hold={
            "longest_s": 120,
            "empty_s": 20,
            "most": 2,
            "objective_header": "x-objective",
            "objectives": {
                "urgent": {"priority": 1},
                "soon": {"priority": -1, "ttft_s": 16.0, "sheddable": True},
                "steady": {"tpot_s": 0.06, "sheddable": True},
            },
        }
        | getattr(request, "param", {}),
    )


@pytest.fixture
def services(services: Services, clock: ManualClock) -> Services:
    return with_fleet(services, clock, wall=clock)


def long(name: str) -> dict[str, Any]:
    """A request of about 25,000 tokens: a replica, with room for 42,000, takes one."""
    message = {"role": "user", "content": f"{name} sea " * 11_000}
    return {**CHAT, "messages": [message], "max_tokens": 50}


async def queued(stream: Stream, name: str, headers: dict[str, str] | None = None) -> None:
    assert asks_envoy_to_wait(await stream.body_first(long(name), headers=headers))


def asks_envoy_to_wait(reply: ProcessingResponse) -> bool:
    timeout = reply.override_message_timeout
    return timeout is not None and timeout.total_seconds() == 120.0


@pytest.fixture
async def full(envoy: EnvoySide, services: Services) -> AsyncIterator[Full]:
    put_replicas(services, kv_tokens=42_000)
    sweeping = asyncio.create_task(dispatch_queued([services]))
    async with envoy.stream() as first, envoy.stream() as second:
        assert chosen(await first.body_first(long("one")))
        assert chosen(await second.body_first(long("other")))
        yield first, second
    sweeping.cancel()


async def test_queued_request_is_sent_to_freed_replica(
    stream: Stream, services: Services, full: Full, clock: ManualClock
) -> None:
    reply = await stream.body_first(
        long("third") | {"model": "chat"}, headers={"x-request-id": "abc"}
    )
    assert asks_envoy_to_wait(reply)
    assert len(services.queue) == 1
    first, second = (record.decision.replica for record in services.log.last(2))
    clock.advance(0.5)
    await full[1].end()
    reply = await stream.read()
    assert chosen(reply) == [second, first]
    assert json.loads(body_of(reply) or b"") == long("third")
    assert len(services.queue) == 0
    (record,) = services.log.of_request("abc")
    assert record.outcome.queued_s == 0.5
    assert re.match(r"r\d is expected to have room ", record.outcome.queue_reason)
    await stream.end()
    await full[0].end()
    assert services.fleet.in_flight == 0
    assert services.body_memory.free == BODY_MEMORY_BYTES


async def test_queued_body_is_held_once(stream: Stream, services: Services, full: Full) -> None:
    size = 8 * 2**20
    body = json.dumps(long("third") | {"model": "chat", "filler": "x" * size}).encode()
    message = bytes(body_first(body))
    reply, held, _ = await traced(stream.send_bytes(message))
    assert asks_envoy_to_wait(reply)
    assert size < held < 1.2 * size
    assert services.body_memory.free == BODY_MEMORY_BYTES - len(body)
    stream.reset()
    await until(lambda: services.body_memory.free == BODY_MEMORY_BYTES)


async def wait_with_headers_first(stream: Stream, _: Services) -> None:
    assert asks_envoy_to_wait(await stream.ask(long("third")))


async def wait_with_unreadable_body(stream: Stream, _: Services) -> None:
    headers = {"content-encoding": "gzip", "content-length": "30000"}
    assert asks_envoy_to_wait(await stream.request_headers(headers=headers))


@pytest.mark.parametrize(
    "wait", [wait_with_headers_first, wait_with_unreadable_body, wait_in_full_duplex]
)
async def test_queued_request_keeps_neither_message_nor_decision(
    stream: Stream, services: Services, full: Full, wait: Callable[[Stream, Services], Any]
) -> None:
    """The headers may take many kB; a decision among a thousand replicas takes 0.3 MB."""
    before = alive(ProcessingRequest), alive(Decision)
    await wait(stream, services)
    assert len(services.queue) == 1
    assert (alive(ProcessingRequest), alive(Decision)) == before
    stream.reset()


async def test_queued_request_leaves_no_garbage(
    stream: Stream, envoy: EnvoySide, services: Services, full: Full
) -> None:
    """A router seldom collects garbage, because requests leave none."""
    gc.collect()
    gc.disable()
    try:
        async with envoy.stream() as other, envoy.stream() as refused:
            await queued(stream, "third")
            await queued(other, "fourth")
            assert status_of(await refused.body_first(long("fifth"))) == 429
            await full[1].end()
            assert chosen(await stream.read())
            waiting = [item for item in gc.get_objects() if isinstance(item, Waiting)]
            assert waiting == [*services.queue]
    finally:
        gc.enable()


async def test_full_body_memory_stops_queueing(
    envoy: EnvoySide, services: Services, full: Full
) -> None:
    services.body_memory.free = 1000
    assert chosen(await envoy.ask_body_first(long("third")))


async def test_duplex_waits_for_room(stream: Stream, services: Services, full: Full) -> None:
    await wait_in_full_duplex(stream, services)
    await full[0].end()
    assert destination(await stream.read())[0] in MEMBERS
    body, ended = chunk_of(await stream.read())
    assert body
    assert not ended


async def test_reset_after_body_ends_wait(
    over_grpc: EnvoySide, services: Services, full: Full
) -> None:
    unforeseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unforeseen.append(context))
    async with over_grpc.stream() as stream:
        await queued(stream, "third")
        await stream.write_body(b"", end_of_stream=True)
        await stream.write_body(b"", end_of_stream=True)
        async with over_grpc.stream() as other:  # same connection: once it is answered, all came
            assert status_of(await other.body_first(CHAT | {"model": "nobody's"})) == 404
        stream.reset()
        await until(lambda: len(services.queue) == 0)
    assert services.fleet.in_flight == 2
    assert services.body_memory.free == BODY_MEMORY_BYTES
    gc.collect()
    assert not unforeseen


async def test_full_queue_answers_429(envoy: EnvoySide, services: Services, full: Full) -> None:
    async with envoy.stream() as first, envoy.stream() as second, envoy.stream() as third:
        await queued(first, "third")
        await queued(second, "fourth")
        left = services.body_memory.free
        assert status_of(await third.body_first(long("third"))) == 429
        assert len(services.queue) == 2
        assert services.body_memory.free == left
    assert samples(services.metrics.refused) == {("too_many_waiting",): 1}


async def test_late_request_is_refused(envoy: EnvoySide, services: Services, full: Full) -> None:
    """Only the queued requests make this request late: the replica itself would be in time."""
    soon = {"x-objective": "soon"}
    async with envoy.stream() as first, envoy.stream() as second, envoy.stream() as late:
        await queued(first, "third")
        await queued(second, "fourth")
        reply = await late.body_first(long("fifth"), headers=soon)
        assert error_of(reply)["code"] == "too_late"
        assert int(refusal_header(reply, "retry-after")) > 1


async def test_queued_request_is_refused_when_late(
    envoy: EnvoySide, services: Services, full: Full, clock: ManualClock
) -> None:
    async with envoy.stream() as stream:
        soon = {"x-objective": "soon", "x-request-id": "abc"}
        await queued(stream, "third", soon)
        for number in (1, 2):
            for _ in range(8):
                services.fleet.dispatch(replica(number), chat(25_000, 1_000))
        clock.advance(0.5)
        reply = await stream.read()
        assert error_of(reply)["code"] == "too_late"
        assert len(services.queue) == 0
        assert not services.log.of_request("abc")
    assert samples(services.metrics.refused) == {("too_late",): 1}


async def test_tpot_target_sheds_no_queue(envoy: EnvoySide, services: Services, full: Full) -> None:
    async with envoy.stream() as first, envoy.stream() as other:
        await queued(first, "third")
        steady = {"x-objective": "steady"}
        await queued(other, "fourth", steady)


@pytest.mark.parametrize("body", [CHAT, {"messages": CHAT["messages"]}], ids=["named", "nameless"])
@pytest.mark.parametrize("unusable", [{"healthy": False}, {"asleep": True}])
async def test_request_waits_for_replica_to_come_back(
    stream: Stream, services: Services, full: Full, clock: ManualClock,
    unusable: dict[str, bool], body: dict[str, Any],
) -> None:  # fmt: skip
    put_replicas(services, **unusable)
    assert asks_envoy_to_wait(await stream.body_first(body))
    clock.advance(4.0)
    put_replicas(services, 2)
    assert chosen(await stream.read())[0] == replica(2)


async def test_request_waits_for_next_replica(
    stream: Stream, services: Services, full: Full, clock: ManualClock
) -> None:
    for number in (1, 2):
        services.fleet.remove(replica(number))
    assert asks_envoy_to_wait(await stream.body_first(CHAT))
    await one_pass(services)
    pool = services.config.pool
    assert samples(services.metrics.unserved) == {(pool, "llama"): 1.0}
    assert samples(services.metrics.replicas_needed)[pool,] >= 1.0
    clock.advance(0.5)
    put_replicas(services, 3)
    assert chosen(await stream.read()) == [replica(3)]
    assert not services.queue.unserved_by_model()


async def test_queued_request_without_replica_gets_503(
    stream: Stream, services: Services, full: Full, clock: ManualClock
) -> None:
    await wait_in_full_duplex(stream, services)
    put_replicas(services, asleep=True)
    clock.advance(0.5)
    services.queue.sweep()
    clock.advance(19.5)
    services.queue.sweep()
    assert len(services.queue) == 1
    clock.advance(0.5)
    reply = await stream.read()
    assert status_of(reply) == 503
    assert refusal_header(reply, "retry-after") == b"1"


@pytest.mark.parametrize("config", [{"longest_s": 10, "empty_s": 20}], indirect=True)
async def test_longest_s_bounds_empty_s(
    stream: Stream, services: Services, full: Full, clock: ManualClock
) -> None:
    put_replicas(services, asleep=True)
    await stream.body_first(CHAT)
    clock.advance(10.0)
    assert status_of(await stream.read()) == 503


async def test_error_in_a_queue_sweep_does_not_end_the_router(
    services: Services, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sweeps: list[int] = []

    def sweep(queue: Queue) -> None:
        sweeps.append(len(sweeps))
        if len(sweeps) == 1:
            raise RuntimeError("unforeseen")

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Queue, "sweep", sweep)
    sweeping = asyncio.create_task(dispatch_queued([services]))
    await until(lambda: len(sweeps) == 3 or sweeping.done())
    assert not sweeping.done()
    assert [record.getMessage() for record in caplog.records] == [
        "dispatch from the queue fails: retrying",
        "dispatch from the queue works again",
    ]
    sweeping.cancel()
