import asyncio
from pathlib import Path

import pytest

from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import Client
from tests.e2e.conftest import SETTINGS
from tests.e2e.stack import Stack
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

EMPTY_S = 10  # longer than the 5 s after which a request tries a replica that is not healthy
UNSERVED = f'extproc_requests_unserved{{model="{MODEL}",pool="default"}}'


def system(directory: Path) -> Stack:
    replicas = (SimulatedReplica("alone", "llama-8b-h100"),)
    return Stack(directory, replicas, {**SETTINGS, "hold": {"empty_s": EMPTY_S}})


async def down(client: Client) -> bool:
    return not any(one["healthy"] for one in (await client.fleet())["replicas"])


async def test_request_waits_until_the_only_replica_is_back(client: Client, stack: Stack) -> None:
    assert (await client.chat()).status == 200
    await stack.stop("alone")
    await until(lambda: down(client))
    waits = asyncio.create_task(client.chat())

    async def unserved() -> bool:
        return await client.metric(UNSERVED) == 1.0

    await until(unserved)
    assert await client.metric('extproc_replicas_needed{pool="default"}') >= 1.0
    await stack.start("alone")
    answer = await waits
    assert answer.status == 200
    assert answer.decision["outcome"]["waited_s"] > 0.0


async def test_request_gets_503_after_empty_s(client: Client, stack: Stack) -> None:
    await stack.stop("alone")
    await until(lambda: down(client))
    answer = await client.chat()
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) > 0
    await stack.start("alone")
