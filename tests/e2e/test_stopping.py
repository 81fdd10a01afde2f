"""Stops one of two routers, as an upgrade does, and kills routers and pollers."""

import signal
from functools import partial

import pytest

from extproc.ground.clock import monotonic
from extproc.proxy.service import LAME_DUCK_S
from tests.e2e.client import HEALTHY_ROUTERS, EnvoyClient
from tests.e2e.conftest import SYSTEM
from tests.e2e.stack import PatientStack
from tests.e2e.test_failures import more, traffic
from tests.waiting import until_read

TIMES = 10
system = partial(SYSTEM, routers=2, pollers=2)


async def unrouted(client: EnvoyClient) -> int:
    return await client.envoy_counts("ext_proc.failure_mode_allowed")


async def test_stopping_router_routes_until_envoy_leaves_it(
    client: EnvoyClient, stack: PatientStack
) -> None:
    """A busy machine may delay Envoy's health check, so the test has several attempts."""
    async with traffic(client, per_second=60) as answers:
        for _ in range(TIMES):
            await more(answers, 20)
            before, router = await unrouted(client), stack.process("router-2")
            began = monotonic()
            router.signal(signal.SIGTERM)
            await until_read(lambda: client.envoy_counts(HEALTHY_ROUTERS), lambda now: now == 1)
            noticed_s = monotonic() - began
            assert await router.wait() == 0
            await more(answers, 60)
            without = await unrouted(client) - before
            if noticed_s < LAME_DUCK_S:
                break
            await stack.start("router-2")
            await stack.wait_routing()
    assert noticed_s < LAME_DUCK_S
    assert without == 0


@pytest.mark.parametrize("name", ["router-2", "poller-2"])
async def test_killed_process_is_warned_of_until_it_returns(
    client: EnvoyClient, stack: PatientStack, name: str
) -> None:
    async def lost() -> bool:
        of = f"{name.removesuffix('-2').capitalize()} "
        return any(
            warning.startswith(of) and "lost: killed" in warning
            for warning in await client.warnings()
        )

    if not stack.process(name).running:
        await stack.start(name)
    if name in stack.routers:
        await until_read(partial(client.metric, "extproc_other_routers"), lambda now: now == 1)
    assert not await lost()
    await stack.kill(name)
    await until_read(lost, lambda now: now)
    await stack.start(name)
    await until_read(lost, lambda now: not now)
