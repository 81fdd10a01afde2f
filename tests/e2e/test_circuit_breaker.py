"""A circuit breaker of Envoy that is full says nothing against the replica."""

import asyncio
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from extproc.lab.harness.envoy_config import Bootstrap
from extproc.lab.harness.stack import SimulatedReplica
from tests.e2e.client import Client
from tests.e2e.stack import Stack
from tests.waiting import until

pytestmark = pytest.mark.process
REPLICAS = (SimulatedReplica("one", "llama-8b-h100"), SimulatedReplica("two", "llama-8b-h100"))


class Narrow(Stack):
    """Its Envoy lets one request at a time to the replicas."""

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        for cluster in bootstrap["static_resources"]["clusters"]:
            if cluster["name"] == "replicas":
                cluster["circuit_breakers"]["thresholds"][0]["max_requests"] = 1
        return bootstrap


async def at_a_replica(client: Client) -> bool:
    return sum([await client.load(one.name) for one in REPLICAS]) == 1


async def test_no_replica_is_left_out_for_it(tmp_path: Path) -> None:
    async with Narrow(tmp_path, REPLICAS) as stack, aiohttp.ClientSession() as session:
        client = Client(stack, session)
        long = asyncio.create_task(client.chat(tokens=20_000))
        await until(partial(at_a_replica, client))  # the router knows of it before Envoy sends it
        refused = [await client.chat(tokens=1) for _ in range(5)]
        assert [answer.status for answer in refused] == [503] * 5
        assert all(answer.decision["excluded"] == [] for answer in refused)
        await client.slow(0.01)
        assert (await long).status == 200
