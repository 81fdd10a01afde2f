"""Requests that Envoy marks, for it will not tell of their responses."""

import pytest

from extproc.config import Config
from extproc.proxy.services import Services
from tests.fakes import ManualClock, fleet_of, replica
from tests.proxy.conftest import on_fleet, samples
from tests.proxy.envoy_side import CHAT, EnvoySide
from tests.proxy.replies import chosen

MARK = {"x-extproc-unseen": "1"}


@pytest.fixture
def config() -> Config:
    named = {"models": {"chat": "llama"}}
    return Config.model_validate({"pool": "of-these-tests", "route": named})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def services(services: Services, clock: ManualClock) -> Services:
    fleet = fleet_of(clock, *["llama-8b-a10"] * 2, names=services.fleet.members.names)
    fleet.known.set()
    return on_fleet(services, fleet)


async def test_skipped_response_avoids_doubtful_replica(
    envoy: EnvoySide, services: Services, clock: ManualClock
) -> None:
    for _ in range(3):
        services.fleet.eligibility.failed(replica(1))
    clock.advance(1.1)
    async with envoy.stream() as first, envoy.stream() as told, envoy.stream() as last:
        assert chosen(await first.body_first(CHAT, headers=MARK)) == [replica(2)]
        assert chosen(await told.body_first(CHAT))[0] == replica(1)
        await told.answer(upstream=replica(1))
        assert chosen(await last.body_first(CHAT, headers=MARK))[0] == replica(1)


async def test_stored_response_is_never_skipped(envoy: EnvoySide, services: Services) -> None:
    stored = {"model": "llama", "input": "hello", "store": True}
    async with envoy.stream() as stream:
        assert chosen(await stream.body_first(stored, "/v1/responses", headers=MARK))
        await stream.end()  # the client hung up
    assert samples(services.metrics.requests) == {("routed",): 1.0, ("unanswered",): 1.0}
