import asyncio
from functools import partial
from pathlib import Path

import pytest

from extproc.cli import main
from tests.e2e.client import Client
from tests.e2e.conftest import SETTINGS
from tests.e2e.stack import FileStack, Stack
from tests.e2e.test_failures import more, traffic
from tests.waiting import until, until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]


def system(directory: Path) -> FileStack:
    return FileStack(directory, settings=SETTINGS)


async def replicas(stack: Stack, *arguments: str) -> int:
    argv = ["replicas", *arguments, "--config", str(stack.config_file)]
    return await asyncio.to_thread(main, argv)


async def test_a_replica_drains_and_comes_back(client: Client, stack: Stack) -> None:
    long = asyncio.create_task(client.chat(tokens=500, headers={"x-extproc-policy": "round_robin"}))
    busy = await client.busy()
    await client.simulate(busy, slow=20.0)  # what is there does not end by itself
    async with traffic(client) as answers:
        await more(answers, 5)
        drained = asyncio.create_task(replicas(stack, "drain", busy, "--wait", "60"))
        await until_read(lambda: client.replica(busy), lambda now: now["draining"])
        assert not long.done()
        await client.simulate(busy, slow=0.1)
        assert await drained == 0
        assert await client.load(busy) == 0
        await client.simulate(busy, slow=1.0)
        later = await more(answers, 10)
        labels = f'reason="draining",replica="{stack.address(busy)}"'
        left_out = partial(client.metric, f"extproc_replica_left_out{{{labels}}}")
        await until(left_out)
        assert await client.metric('extproc_replicas_needed{pool="default"}') > 0.0
        assert await replicas(stack, "undrain", busy) == 0
        await until_read(lambda: client.replica(busy), lambda now: not now["draining"])
    await until_read(left_out, lambda now: now == 0)
    assert (await long).status == 200
    assert {answer.status for answer in answers} == {200}
    for answer in later:
        assert answer.decision["replica_name"] != busy
        assert {"replica": stack.address(busy), "name": busy, "why": "draining"} in (
            answer.decision["excluded"]
        )


async def test_unlisted_replica_gets_nothing_until_listed(client: Client, stack: FileStack) -> None:
    async def names() -> set[str]:
        return {one["name"] for one in (await client.fleet())["replicas"]}

    labels = f'policy="round_robin",replica="{stack.address("fast-2")}"'
    counted = partial(client.metric, f"extproc_decisions_total{{{labels}}}")
    for _ in range(8):
        await client.chat(tokens=1, headers={"x-extproc-policy": "round_robin"})
    assert await counted() > 0
    async with traffic(client) as answers:
        await more(answers, 3)
        usual = stack.listed()
        stack.list_replicas([one for one in usual if one["name"] != "fast-2"])
        await until_read(names, lambda now: "fast-2" not in now)
        later = await more(answers, 10)
        await until_read(counted, lambda now: now == 0)
        stack.list_replicas(usual)
        await until_read(names, lambda now: "fast-2" in now)
    assert {answer.status for answer in answers} == {200}
    assert "fast-2" not in {answer.decision["replica_name"] for answer in later}
