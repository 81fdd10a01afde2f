"""Stops one of two routers, as an upgrade does."""

import signal
from functools import partial

from extproc.ground.clock import monotonic
from extproc.lab.harness.processes import Process
from extproc.proxy.service import LAME_DUCK_S
from tests.e2e.client import HEALTHY_ROUTERS, EnvoyClient
from tests.e2e.conftest import SYSTEM
from tests.e2e.test_failures import more, traffic
from tests.waiting import until_read

TIMES = 10
system = partial(SYSTEM, routers=2)


async def unrouted(client: EnvoyClient) -> int:
    return await client.envoy_counts("ext_proc.failure_mode_allowed")


async def seconds_until_envoy_leaves(client: EnvoyClient, stopped: Process) -> float:
    began = monotonic()
    stopped.signal(signal.SIGTERM)
    await until_read(lambda: client.envoy_counts(HEALTHY_ROUTERS), lambda now: now == 1)
    return monotonic() - began


async def test_stopping_router_routes_until_envoy_leaves_it(client: EnvoyClient) -> None:
    """A busy machine may delay Envoy's health check, so the test has several attempts."""
    async with traffic(client, per_second=60) as answers:
        for _ in range(TIMES):
            await more(answers, 20)
            before, router = await unrouted(client), client.stack.process("router-2")
            noticed_s = await seconds_until_envoy_leaves(client, router)
            assert await router.wait() == 0
            await more(answers, 60)
            without = await unrouted(client) - before
            if noticed_s < LAME_DUCK_S:
                break
            await client.stack.start("router-2")
            await client.stack.wait_routing()
    assert noticed_s < LAME_DUCK_S
    assert without == 0
