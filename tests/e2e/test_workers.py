"""A router of several worker processes behind a real Envoy."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from tests.children import worker_pid
from tests.e2e.client import Client
from tests.e2e.stack import Stack
from tests.e2e.test_failures import more, traffic
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

WORKERS = 4


def system(directory: Path) -> Stack:
    return Stack(directory, workers=WORKERS)


async def shares(stack: Stack, client: Client) -> list[float]:
    return [await client.routed(admin) for admin in stack.worker_admins()]


async def test_each_worker_gets_a_fair_share(stack: Stack, client: Client) -> None:
    before = await shares(stack, client)
    async with traffic(client, per_second=60) as answers:
        await more(answers, 500)
    got = [now - then for now, then in zip(await shares(stack, client), before, strict=True)]
    assert {answer.status for answer in answers} == {200}
    assert sum(got) == len(answers)
    assert min(got) > 0.15 * len(answers)  # by chance less in one of seven million cases


async def test_a_worker_killed_under_load_costs_no_request_and_is_used_again(
    stack: Stack, client: Client
) -> None:
    async def used() -> bool:
        with suppress(aiohttp.ClientConnectionError):
            return await client.routed(stack.worker_admins()[2]) > 5
        return False

    async with traffic(client, per_second=40) as answers:
        await more(answers, 20)
        os.kill(worker_pid(stack.process("router").pid, 2), signal.SIGKILL)
        await until(used)
        await more(answers, 20)
    assert {answer.status for answer in answers} == {200}
