"""A router of several worker processes behind a real Envoy."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
import pytest_asyncio

from extproc.demo.stack import MODEL
from tests.children import worker_pid
from tests.e2e.client import CHAT, MESSAGES
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

WORKERS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with Stack(tmp_path_factory.mktemp("stack"), workers=WORKERS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


@asynccontextmanager
async def traffic(stack: Stack, session: aiohttp.ClientSession) -> AsyncIterator[list[int]]:
    """Steady requests, 40 a second; their statuses, complete when the block has ended."""
    statuses: list[int] = []
    ended = asyncio.Event()

    async def one() -> None:
        body = {"model": MODEL, "messages": MESSAGES}
        wanted = {"x-simulate-output-tokens": "20"}
        async with session.post(stack.url + CHAT, json=body, headers=wanted) as response:
            await response.read()
            statuses.append(response.status)

    async def send(tasks: asyncio.TaskGroup) -> None:
        while not ended.is_set():
            tasks.create_task(one())
            await asyncio.sleep(1 / 40)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send(tasks))
        try:
            yield statuses
        finally:
            ended.set()


async def more(statuses: list[int], count: int) -> None:
    """Returns when that many more requests were answered."""
    wanted = len(statuses) + count
    async with asyncio.timeout(30):
        while len(statuses) < wanted:  # noqa: ASYNC110 - nothing signals an answer
            await asyncio.sleep(0.02)


async def routed(session: aiohttp.ClientSession, admin: str) -> float:
    """How many requests a worker has routed."""
    async with session.get(f"{admin}/metrics") as response:
        lines = (await response.text()).splitlines()
    name = 'extproc_requests_total{result="routed"} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


async def shares(stack: Stack, session: aiohttp.ClientSession) -> list[float]:
    return [await routed(session, admin) for admin in stack.worker_admins()]


async def test_each_worker_gets_a_fair_share(stack: Stack, session: aiohttp.ClientSession) -> None:
    before = await shares(stack, session)
    async with traffic(stack, session) as statuses:
        await more(statuses, 200)
    got = [now - then for now, then in zip(await shares(stack, session), before, strict=True)]
    assert set(statuses) == {200}
    assert sum(got) == len(statuses)
    assert min(got) > 0.15 * len(statuses)  # 0.25 each, give or take five standard deviations


async def test_a_worker_killed_under_load_costs_no_request_and_is_used_again(
    stack: Stack, session: aiohttp.ClientSession
) -> None:
    async with traffic(stack, session) as statuses:
        await more(statuses, 20)
        os.kill(worker_pid(stack.process("router").pid, 2), signal.SIGKILL)

        async with asyncio.timeout(20):
            while True:
                await more(statuses, 10)
                try:
                    if await routed(session, stack.worker_admins()[2]) > 5:
                        break
                except aiohttp.ClientConnectionError:
                    continue
        await more(statuses, 20)
    assert set(statuses) == {200}
