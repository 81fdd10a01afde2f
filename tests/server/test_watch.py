"""Which responses Envoy is asked to tell of."""

from dataclasses import replace

import pytest
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as BodyMode,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeHeaderSendMode as HeaderMode,
)

from extproc.server.services import Services
from tests.fakes import ManualClock
from tests.server.envoy_side import CHAT, EnvoySide, destination

PER_S = 100


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def services(services: Services, clock: ManualClock) -> Services:
    return replace(services, clock=clock)


async def ask(
    envoy: EnvoySide, status: int = 200, body_mode: BodyMode = BodyMode.BUFFERED
) -> tuple[bool, str]:
    """One request to its end: whether Envoy was to tell of its response, and the replica."""
    async with envoy.stream() as stream:
        mode = (await stream.request_headers(body_mode=body_mode)).mode_override
        unseen = mode is not None and mode.response_header_mode == HeaderMode.SKIP
        if unseen:
            assert mode is not None
            assert mode.request_body_mode == body_mode
        replica = destination(await stream.request_body(CHAT))[0]
        if not unseen:
            await stream.response_headers(status, upstream=replica)
        await stream.end()
    return not unseen, replica


async def test_of_many_responses_so_many_a_second_are_looked_at(
    envoy: EnvoySide, services: Services, clock: ManualClock
) -> None:
    seen = [(await ask(envoy))[0] for _ in range(PER_S + 10)]
    assert seen == [True] * PER_S + [False] * 10
    clock.advance(0.055)
    seen = [(await ask(envoy))[0] for _ in range(10)]
    assert seen == [True] * 5 + [False] * 5
    assert services.fleet.in_flight == 0
    (requests,) = services.metrics.requests.collect()
    assert {sample.labels["result"] for sample in requests.samples} == {"routed"}


async def test_the_body_comes_as_envoy_was_told_in_its_configuration(envoy: EnvoySide) -> None:
    """Envoy takes a mode that is overridden as a whole: ``ask`` looks at the body's."""
    for _ in range(PER_S):
        await ask(envoy)
    for mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
        assert not (await ask(envoy, body_mode=mode))[0]


async def test_until_a_replica_that_failed_is_well_all_are_looked_at(envoy: EnvoySide) -> None:
    for _ in range(PER_S - 1):
        await ask(envoy)
    seen, failed = await ask(envoy, status=503)
    assert seen
    answered = ""
    while answered != failed:
        seen, answered = await ask(envoy)
        assert seen
    assert not (await ask(envoy))[0]
