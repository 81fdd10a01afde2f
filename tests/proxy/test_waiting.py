"""Requests that wait at the router, as Envoy sees them."""

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingResponse

from extproc.config import Config
from extproc.proxy.app import let_go
from extproc.proxy.services import MOST_HELD, Services
from extproc.route.queue import Queue
from tests.fakes import ManualClock, chat, fleet_of, replica, state
from tests.proxy.conftest import on_fleet, put_replicas, samples
from tests.proxy.envoy_side import CHAT, DUPLEX, EnvoySide, Stream
from tests.proxy.replies import body_of, chosen, chunk_of, destination, status_of
from tests.waiting import until

MEMBERS = {replica(1), replica(2)}


async def wait_in_full_duplex(stream: Stream, services: Services) -> None:
    """Sends a request as a gateway does, which has to wait."""
    await stream.write_headers(**DUPLEX)
    await stream.write_body(json.dumps(long("third")).encode())
    await until(lambda: len(services.queue) == 1)


@pytest.fixture
def config() -> Config:
    return Config.model_validate(
        {
            "route": {"models": {"chat": "llama"}, "seed": 1},
            "hold": {
                "longest_s": 120,
                "most": 2,
                "objective_header": "x-objective",
                "objectives": {
                    "urgent": {"priority": 1},
                    "soon": {"priority": -1, "ttft_s": 24.0, "sheddable": True},
                    "steady": {"tpot_s": 0.06, "sheddable": True},
                },
            },
        }
    )


@pytest.fixture
def clock() -> ManualClock:
    """Polls are as new as they were, however slow the machine."""
    return ManualClock(1000.0)


@pytest.fixture
def services(services: Services, clock: ManualClock) -> Services:
    fleet = fleet_of(clock, *["llama-8b-a10"] * 2, names=services.fleet.members.names)
    fleet.known.set()
    queue = Queue(fleet, services.config.hold, clock)
    return on_fleet(services, fleet, queue=queue, clock=clock, wall=clock)


def long(name: str) -> dict[str, Any]:
    """Some 25,000 tokens of the 42,000 that fit: a replica carries one of them."""
    message = {"role": "user", "content": f"{name} sea " * 11_000}
    return {**CHAT, "messages": [message], "max_tokens": 50}


def told_to_wait(reply: ProcessingResponse) -> bool:
    timeout = reply.override_message_timeout
    return timeout is not None and timeout.total_seconds() == 120.0


@pytest.fixture
async def full(
    envoy: EnvoySide, services: Services, clock: ManualClock
) -> AsyncIterator[tuple[Stream, Stream]]:
    """A request on each replica that leaves no room."""
    for number in (1, 2):
        known = state(number, "llama-8b-a10", clock, kv_tokens=42_000, measured=True)
        services.fleet.put(known)
    looking = asyncio.create_task(let_go([services]))
    async with envoy.stream() as one, envoy.stream() as other:
        assert chosen(await one.body_first(long("one")))
        assert chosen(await other.body_first(long("other")))
        yield one, other
    looking.cancel()


async def test_it_is_sent_when_one_ends_to_where_that_was(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream], clock: ManualClock
) -> None:
    async with envoy.stream() as stream:
        reply = await stream.body_first(
            long("third") | {"model": "chat"}, headers={"x-request-id": "abc"}
        )
        assert told_to_wait(reply)
        assert len(services.queue) == 1
        one, other = (record.decision.replica for record in services.log.last(2))
        clock.advance(0.5)
        await full[1].end()
        reply = await stream.read()
        assert chosen(reply) == [other, one]
        assert json.loads(body_of(reply) or b"") == long("third")
        assert len(services.queue) == 0
        (record,) = services.log.of_request("abc")
        assert record.outcome.waited_s == 0.5
        assert re.match(r"r\d would ", record.outcome.waited_for)
        await stream.end()
    await full[0].end()
    assert services.fleet.in_flight == 0
    assert services.room.free == MOST_HELD


async def test_what_finds_no_room_for_its_body_does_not_wait(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream]
) -> None:
    services.room.take(services.room.free - 1000)
    assert chosen(await envoy.ask_body_first(long("third")))


async def test_a_gateway_gets_nothing_until_then(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream]
) -> None:
    async with envoy.stream() as stream:
        await wait_in_full_duplex(stream, services)
        await full[0].end()
        assert set(destination(await stream.read())) == MEMBERS
        body, ended = chunk_of(await stream.read())
        assert body
        assert not ended


async def test_who_hangs_up_meanwhile_leaves(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream]
) -> None:
    async with envoy.stream() as stream:
        assert told_to_wait(await stream.body_first(long("third")))
        stream.reset()
        await until(lambda: len(services.queue) == 0)
    assert services.fleet.in_flight == 2
    assert services.room.free == MOST_HELD


async def test_who_hangs_up_after_more_of_a_body_came_leaves(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream]
) -> None:
    unforeseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unforeseen.append(context))
    async with envoy.stream() as stream:
        assert told_to_wait(await stream.body_first(long("third")))
        await stream.write_body(b"", end_of_stream=True)
        await stream.write_body(b"", end_of_stream=True)
        async with envoy.stream() as other:  # on this connection: when it is answered, they came
            assert status_of(await other.body_first(CHAT | {"model": "nobody's"})) == 404
        stream.reset()
        await until(lambda: len(services.queue) == 0)
    assert services.fleet.in_flight == 2
    assert services.room.free == MOST_HELD
    gc.collect()
    assert not unforeseen


async def test_a_stream_that_is_closed_meanwhile_leaves(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream]
) -> None:
    async with envoy.stream() as stream:
        assert told_to_wait(await stream.body_first(long("third")))
        await stream.end()
        assert len(services.queue) == 0


async def test_objectives_go_by_priority(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream]
) -> None:
    async with envoy.stream() as usual, envoy.stream() as urgent:
        assert told_to_wait(await usual.body_first(long("usual")))
        assert told_to_wait(
            await urgent.body_first(long("urgent"), headers={"x-objective": "urgent"})
        )
        await full[0].end()
        assert chosen(await urgent.read())
        assert len(services.queue) == 1
        await full[1].end()
        assert chosen(await usual.read())


async def test_too_many_that_wait_are_refused(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream]
) -> None:
    async with envoy.stream() as one, envoy.stream() as two, envoy.stream() as three:
        assert told_to_wait(await one.body_first(long("third")))
        assert told_to_wait(await two.body_first(long("fourth")))
        left = services.room.free
        assert status_of(await three.body_first(long("third"))) == 429
        assert len(services.queue) == 2
        assert services.room.free == left
    assert samples(services.metrics.refused) == {("too_many_waiting",): 1}


async def test_what_would_be_too_late_is_refused_at_once(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream]
) -> None:
    """By what waits before it: on its replica the first token would come in time."""
    soon = {"x-objective": "soon"}
    async with envoy.stream() as one, envoy.stream() as two, envoy.stream() as late:
        assert told_to_wait(await one.body_first(long("third")))
        assert told_to_wait(await two.body_first(long("fourth"), headers=soon))
        reply = await late.body_first(long("fifth"), headers=soon)
        assert reply.immediate_response is not None
        assert json.loads(reply.immediate_response.body)["error"]["code"] == "too_late"
        headers = reply.immediate_response.headers
        assert headers is not None
        sent = [option.header for option in headers.set_headers]
        told = {header.key: header.raw_value for header in sent if header is not None}
        assert int(told["retry-after"]) > 1


async def test_what_becomes_late_while_it_waits_is_refused_then(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream], clock: ManualClock
) -> None:
    async with envoy.stream() as stream:
        soon = {"x-objective": "soon", "x-request-id": "abc"}
        assert told_to_wait(await stream.body_first(long("third"), headers=soon))
        for number in (1, 2):
            for _ in range(8):
                services.fleet.dispatch(replica(number), chat(25_000, 1_000))
        clock.advance(0.5)
        reply = await stream.read()
        assert reply.immediate_response is not None
        assert json.loads(reply.immediate_response.body)["error"]["code"] == "too_late"
        assert len(services.queue) == 0
        assert not services.log.of_request("abc")
    assert samples(services.metrics.refused) == {("too_late",): 1}


async def test_waiting_makes_no_token_slower(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream]
) -> None:
    async with envoy.stream() as one, envoy.stream() as other:
        assert told_to_wait(await one.body_first(long("third")))
        steady = {"x-objective": "steady"}
        assert told_to_wait(await other.body_first(long("fourth"), headers=steady))


async def test_where_no_replica_is_left_meanwhile_a_gateway_is_told_so(
    envoy: EnvoySide, services: Services, full: tuple[Stream, Stream], clock: ManualClock
) -> None:
    async with envoy.stream() as stream:
        await wait_in_full_duplex(stream, services)
        put_replicas(services, healthy=False)
        clock.advance(0.5)
        assert status_of(await stream.read()) == 503
