import asyncio
from functools import partial
from pathlib import Path

import pytest

from extproc.cli import main
from tests.e2e.client import Client
from tests.e2e.conftest import SETTINGS
from tests.e2e.stack import FileStack, Stack
from tests.e2e.test_failures import more, traffic
from tests.waiting import until

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

    async def draining() -> bool:
        return bool((await client.replica(busy))["draining"])

    async with traffic(client) as answers:
        await more(answers, 5)
        drained = asyncio.create_task(replicas(stack, "drain", busy, "--wait", "60"))
        await until(draining)
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

        async def back() -> bool:
            return not (await client.replica(busy))["draining"]

        await until(back)

    async def nothing_against_it() -> bool:
        return await left_out() == 0

    await until(nothing_against_it)
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

    async def forgotten() -> bool:
        return await counted() == 0

    for _ in range(8):
        await client.chat(tokens=1, headers={"x-extproc-policy": "round_robin"})
    assert await counted() > 0
    async with traffic(client) as answers:
        await more(answers, 3)
        usual = stack.listed()
        stack.list_replicas([one for one in usual if one["name"] != "fast-2"])

        async def gone() -> bool:
            return "fast-2" not in await names()

        await until(gone)
        later = await more(answers, 10)
        await until(forgotten)
        stack.list_replicas(usual)

        async def back() -> bool:
            return "fast-2" in await names()

        await until(back)
    assert {answer.status for answer in answers} == {200}
    assert "fast-2" not in {answer.decision["replica_name"] for answer in later}
