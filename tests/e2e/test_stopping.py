"""Of two routers one is stopped, as at every upgrade."""

import signal
from pathlib import Path

import pytest

from tests.e2e.client import Client
from tests.e2e.conftest import SETTINGS
from tests.e2e.stack import Stack
from tests.e2e.test_failures import more, traffic

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]


def system(directory: Path) -> Stack:
    return Stack(directory, settings=SETTINGS, routers=2)


async def without_router(client: Client) -> int:
    """Requests that Envoy went on with though it had asked a router."""
    return await client.envoy_counts("ext_proc.failure_mode_allowed")


async def test_a_router_that_stops_routes_until_envoy_has_left_it_out(
    client: Client, stack: Stack
) -> None:
    async with traffic(client, per_second=60) as answers:
        await more(answers, 20)
        before = await without_router(client)
        router = stack.process("router-2")
        router.signal(signal.SIGTERM)
        assert await router.wait() == 0
        await more(answers, 60)
        assert await without_router(client) == before
    assert {answer.status for answer in answers} == {200}
