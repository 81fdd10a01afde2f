"""The router ends requests on hung replicas, and no other requests."""

import asyncio
from collections.abc import AsyncIterator, Container, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from extproc.config import Config
from extproc.lab.replay.recorded import read
from extproc.proxy.exchange import Exchange
from extproc.proxy.service import GrpcServer
from extproc.proxy.services import Services
from tests.fakes import replica
from tests.proxy.conftest import config_of, put_replicas, samples
from tests.proxy.envoy_side import CHAT, EVENTS, EnvoySide, Stream, body_first, running
from tests.proxy.replies import chosen, error_of, status_of
from tests.proxy.test_record import write_record
from tests.proxy.test_watch import MARK
from tests.waiting import until

IN_TURN = {"x-extproc-policy": "round_robin"}


@pytest.fixture
async def server(services: Services) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(services)
    ending = asyncio.create_task(server.watch_replicas())
    yield server
    ending.cancel()


@pytest.fixture
async def envoy(server: GrpcServer) -> AsyncIterator[EnvoySide]:
    async with running(server, max_receive_message_length=-1) as channel:
        yield EnvoySide(channel)


async def sent_to(stream: Stream, mark: Mapping[str, str] = MappingProxyType({})) -> str:
    return chosen(await stream.body_first(CHAT, headers=IN_TURN | dict(mark)))[0]


def hangs(services: Services, on: str, seconds: float = 20.5) -> None:
    number = 1 + (on == replica(2))
    put_replicas(services, number, healthy=False, unanswered_s=seconds)


@pytest.mark.parametrize("mark", [{}, MARK])
async def test_requests_on_hung_replica_end_with_503(
    envoy: EnvoySide, services: Services, mark: dict[str, str]
) -> None:
    async with envoy.stream() as lost, envoy.stream() as other:
        on = await sent_to(lost, mark)
        healthy = await sent_to(other, mark)
        assert {on, healthy} == {replica(1), replica(2)}
        hangs(services, on)
        reply = await lost.read()
        assert status_of(reply) == 503
        assert "send the request again" in error_of(reply)["message"]
        assert services.fleet.in_flight_on(on) == 0
        assert services.fleet.in_flight_on(healthy) == 1
        await lost.end()
        await other.end()
    assert samples(services.metrics.requests)["lost",] == 1.0


async def test_replica_that_streams_is_not_hung(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as first, envoy.stream() as second:
        on = await sent_to(first)
        assert await sent_to(second) != on
        await first.response_headers(upstream=on)
        hangs(services, on)
        for _ in range(3):
            await first.response_body({"id": "1"}, end_of_stream=False)
        assert not services.fleet.eligibility.hung(20.0)
        await first.end()


async def test_failure_to_end_one_request_spares_others(
    envoy: EnvoySide, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_if_hung, broken = Exchange.end_if_hung, list[Exchange]()

    def first_fails(exchange: Exchange, hung: Container[str]) -> bytes | None:
        broken.append(exchange)
        if exchange is broken[0]:
            raise RuntimeError
        return end_if_hung(exchange, hung)

    monkeypatch.setattr(Exchange, "end_if_hung", first_fails)
    async with envoy.stream() as first:
        on = await sent_to(first)
        async with envoy.stream() as other, envoy.stream() as second:
            await sent_to(other)
            assert await sent_to(second) == on
            hangs(services, on)
            assert (await second.read()).immediate_response
            for stream in (first, other, second):
                await stream.end()


@pytest.mark.parametrize("config", [config_of(serve={"hung_s": 0.0})])
async def test_hung_s_zero_ends_nothing(
    stream: Stream, server: GrpcServer, services: Services
) -> None:
    on = await sent_to(stream)
    hangs(services, on, 1000.0)
    server.end_hung()
    assert services.fleet.in_flight_on(on) == 1
    await stream.end()


class TestRecorded:
    @pytest.fixture
    def config(self, tmp_path: Path) -> Config:
        return config_of(record={"path": str(tmp_path / "record")}, serve={"hung_s": 0.1})

    @pytest.mark.parametrize("mark", [{}, MARK])
    async def test_ended_requests_are_recorded_as_failed(
        self, envoy: EnvoySide, services: Services, tmp_path: Path, mark: dict[str, str]
    ) -> None:
        async with envoy.stream() as lost, envoy.stream() as other:
            on = await sent_to(lost, mark)
            healthy = await sent_to(other)
            await other.answer({"id": "1"}, upstream=healthy)
            if not mark:
                await lost.response_headers(upstream=on, content_type=EVENTS)
            hangs(services, on, 0.1)
            await until(lambda: not services.fleet.in_flight)
        await write_record(services)
        assert read(tmp_path / "record").excluded == {"failed": 1}


@pytest.mark.parametrize("config", [config_of(route={"models": {"chat": "llama"}})])
async def test_unread_large_reply_is_sent_before_the_refusal(
    envoy: EnvoySide, stream: Stream, services: Services
) -> None:
    """An Envoy that does not read delays the end of no other request."""
    large = {"model": "chat", "messages": [{"role": "user", "content": "a" * 16_000_000}]}
    await stream.write(body_first(large))
    await until(lambda: services.fleet.in_flight)
    on = replica(1 + services.fleet.in_flight_on(replica(2)))
    hangs(services, on)
    await until(lambda: not services.fleet.in_flight)
    async with envoy.stream() as later:
        other = await sent_to(later)
        put_replicas(services, 1 + (on == replica(2)))
        hangs(services, other)
        assert (await later.read()).immediate_response
        await later.end()
    assert chosen(await stream.read())
    assert (await stream.read()).immediate_response
    await stream.end()
