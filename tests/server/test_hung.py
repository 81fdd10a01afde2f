"""Requests on a replica that hangs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from extproc.config import Config
from extproc.replay.recorded import read
from extproc.server.service import GrpcServer
from extproc.server.services import Services
from tests.fakes import ManualClock, replica, state
from tests.server.envoy_side import CHAT, EnvoySide, chosen
from tests.server.test_record import written
from tests.server.test_unseen import MARK
from tests.waiting import until

IN_TURN = {"x-extproc-policy": "round_robin"}


@pytest.fixture
async def server(services: Services) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(services)
    ending = asyncio.create_task(server.end_lost())
    yield server
    ending.cancel()
    await server.stop(0)


@pytest.fixture
async def envoy(server: GrpcServer) -> AsyncIterator[EnvoySide]:
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield EnvoySide(channel)


def hangs(services: Services, number: int, seconds: float) -> None:
    clock = ManualClock(services.wall())
    figures = {"healthy": False, "unanswered_s": seconds}
    services.fleet.put(state(number, "llama-8b-a10", clock, **figures))


@pytest.mark.parametrize("mark", [{}, MARK])
async def test_are_ended_and_those_on_others_go_on(
    envoy: EnvoySide, services: Services, mark: dict[str, str]
) -> None:
    async with envoy.stream() as lost, envoy.stream() as kept:
        on = chosen(await lost.body_first(CHAT, headers=IN_TURN | mark))[0]
        other = chosen(await kept.body_first(CHAT, headers=IN_TURN | mark))[0]
        assert {on, other} == {replica(1), replica(2)}
        hangs(services, 1 + (on == replica(2)), 20.5)
        answer = (await lost.read()).immediate_response
        assert answer is not None
        assert answer.status is not None
        assert answer.status.code == 503
        assert b"send it again" in answer.body
        assert services.fleet.in_flight_on(on) == 0
        assert services.fleet.in_flight_on(other) == 1
        await lost.end()
        await kept.end()
    (requests,) = services.metrics.requests.collect()
    counted = {sample.labels["result"]: sample.value for sample in requests.samples}
    assert counted["lost"] == 1.0


async def test_one_whose_answer_comes_is_not_ended(envoy: EnvoySide, services: Services) -> None:
    async with envoy.stream() as first, envoy.stream() as second:
        on = chosen(await first.body_first(CHAT, headers=IN_TURN))[0]
        assert chosen(await second.body_first(CHAT, headers=IN_TURN))[0] != on
        hangs(services, 1 + (on == replica(2)), 20.5)
        await first.response_headers(upstream=on)
        for _ in range(3):
            await first.response_body({"id": "1"}, end_of_stream=False)
        assert not services.fleet.eligibility.hung(20.0)
        await first.end()


class TestNever:
    """Where the setting says so."""

    @pytest.fixture
    def config(self) -> Config:
        return Config.model_validate({"serve": {"hung_s": 0.0}})

    async def test_nothing_is_ended(
        self, envoy: EnvoySide, server: GrpcServer, services: Services
    ) -> None:
        async with envoy.stream() as stream:
            on = chosen(await stream.body_first(CHAT, headers=IN_TURN))[0]
            hangs(services, 1 + (on == replica(2)), 1000.0)
            await server._processor.end_lost()
            assert services.fleet.in_flight_on(on) == 1
            await stream.end()


class TestRecorded:
    """Nobody knows how long it would have taken."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> Config:
        return Config.model_validate(
            {"record": {"path": str(tmp_path / "record")}, "serve": {"hung_s": 0.1}}
        )

    @pytest.mark.parametrize("mark", [{}, MARK])
    async def test_as_failed(
        self, envoy: EnvoySide, services: Services, tmp_path: Path, mark: dict[str, str]
    ) -> None:
        async with envoy.stream() as lost, envoy.stream() as kept:
            on = chosen(await lost.body_first(CHAT, headers=IN_TURN | mark))[0]
            other = chosen(await kept.body_first(CHAT, headers=IN_TURN))[0]
            await kept.response_headers(upstream=other)
            await kept.response_body({"id": "1"})
            await kept.end()
            if not mark:
                await lost.response_headers(upstream=on, content_type="text/event-stream")
            hangs(services, 1 + (on == replica(2)), 0.1)
            await until(lambda: not services.fleet.in_flight)
        await written(services)
        assert read(tmp_path / "record").left_out == {"failed": 1}
