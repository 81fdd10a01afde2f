"""Replicas that are excluded for a while: a full engine, failures."""

import asyncio
from functools import partial
from typing import Any

import pytest

from extproc.lab.harness.stack import SimulatedReplica
from tests.e2e.client import IN_TURN, EnvoyClient
from tests.e2e.stack import SETTINGS, PatientStack, here
from tests.waiting import until, until_read

H100 = "llama-8b-h100"
NAMES = "limited", "plain"
PLAIN = ("--kv-tokens", "4800")
LIMITED = (*PLAIN, "--max-num-queued-reqs", "12")
FLEET = (SimulatedReplica("limited", H100, LIMITED), SimulatedReplica("plain", H100, PLAIN))
"""An engine that refuses more than 12 requests, and an engine that queues them."""
system = partial(PatientStack, replicas=here(FLEET, "limited"), settings=SETTINGS)


async def excluded(client: EnvoyClient, reason: str = "") -> list[str]:
    """Return the names of the excluded replicas, for this reason if given."""
    metric = "extproc_replica_excluded"
    reasons = [reason] if reason else ["unhealthy", "stalled", "failing", "full", "asleep"]
    return [
        replica["name"]
        for replica in await client.replicas()
        for why in reasons
        if await client.metric(f'{metric}{{reason="{why}",replica="{replica["id"]}"}}')
    ]


async def none_excluded(client: EnvoyClient) -> None:
    await until_read(partial(excluded, client), lambda now: not now)


async def served(client: EnvoyClient, name: str) -> bool:
    answer = await client.chat(tokens=1, headers=IN_TURN, status=None)
    return answer.status == 200 and answer.decision["replica_name"] == name


async def test_full_engine_is_never_ejected(client: EnvoyClient) -> None:
    refusals = "vllm:admission_rejections_total"
    before = await client.replica_counts("limited", refusals)
    for burst in range(3):
        asked = [client.uncached(f"{burst} {n}", words=5, headers=IN_TURN) for n in range(60)]
        assert set(await asyncio.gather(*asked)) == {200}
        assert not await excluded(client, "failing")
    assert await client.replica_counts("limited", refusals) > before
    await until(lambda: served(client, "limited"))


@pytest.mark.parametrize(
    ("fault", "status"), [({"fail": 500}, 500), ({"reset": True}, 503)], ids=["fails", "resets"]
)
async def test_request_that_fails_everywhere_ejects_no_replica(
    client: EnvoyClient, fault: dict[str, Any], status: int
) -> None:
    await none_excluded(client)
    async with client.simulating("limited", **fault), client.simulating("plain", **fault):
        for _ in range(10):
            await client.chat(headers=IN_TURN, status=status)
    assert not await excluded(client)
    chosen = [(await client.chat(headers=IN_TURN)).decision["replica_name"] for _ in range(4)]
    assert set(chosen) == set(NAMES)


async def test_replica_that_refuses_connections_is_ejected(client: EnvoyClient) -> None:
    """A refused connection counts, even if the request has failed on another replica before."""
    with client.stack.paused("poller"):  # or a poll may find first that the replica is down
        await client.stack.kill("limited")
        async with client.simulating("plain", reset=True):
            answers = [await client.chat(headers=IN_TURN, status=503) for _ in range(10)]
        reasons = [
            exclusion["why"] for answer in answers for exclusion in answer.decision["excluded"]
        ]
        assert any(why.startswith("ejected") for why in reasons)
    await client.stack.start("limited")
    await until(lambda: served(client, "limited"))
    await none_excluded(client)
