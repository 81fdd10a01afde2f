"""A replica that hangs: its machine still takes connections, and nothing is ever answered."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import CHAT, MESSAGES, Client
from tests.e2e.stack import Stack
from tests.waiting import until, until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

REPLICAS = (SimulatedReplica("one", "llama-8b-h100"), SimulatedReplica("two", "llama-8b-a10"))
"""The first is chosen while nothing speaks against it."""
HUNG_S, LATE_S = 2.0, 60.0  # what hangs so long is given up; or longer than any machine is busy
LONG = 3000  # tokens of an answer that `one` has begun and not ended when it is stopped


class Doubting(Stack):
    doubts_s = 0.1


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[HUNG_S])
async def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    settings = {"serve": {"hung_s": request.param, "chunks_per_s": 1e6}}
    async with Doubting(tmp_path_factory.mktemp("hung"), REPLICAS, settings) as running:
        yield running


@asynccontextmanager
async def stopped(stack: Stack, client: Client) -> AsyncIterator[None]:
    stack.process("one").signal(signal.SIGSTOP)
    try:
        yield
    finally:
        stack.process("one").signal(signal.SIGCONT)

    async def back() -> bool:
        one = await client.replica("one")
        return bool(one["healthy"] and not one["unanswered_s"])

    await until(back)


async def come(client: Client, name: str, requests: int) -> None:
    """Returns when so many are in flight there."""
    await until_read(lambda: client.replica(name), lambda now: now["in_flight"] == requests)


async def avoided(client: Client) -> None:
    async def owes() -> bool:
        one = await client.replica("one")
        return bool(one["healthy"] and one["unanswered_s"] >= 0.5)

    await until(owes)


async def test_hung_replica_is_avoided_and_its_requests_end(client: Client, stack: Stack) -> None:
    whole = asyncio.create_task(client.chat(tokens=LONG))
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    long = {"x-simulate-output-tokens": str(LONG)}
    async with (
        aiohttp.ClientSession() as session,
        session.post(stack.url + CHAT, json=body, headers=long) as stream,
    ):
        await stream.content.readany()
        await come(client, "one", 2)
        async with stopped(stack, client):
            await avoided(client)
            later = [await client.chat(tokens=2) for _ in range(10)]
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
            refused = await whole
            assert (await client.replica("one"))["in_flight"] == 0
    assert [answer.status for answer in later] == [200] * 10
    assert {answer.decision["replica_name"] for answer in later} == {"two"}
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    assert b"the replica that had this request hangs" in refused.body
    assert refused.decision["outcome"]["status"] == 503
    assert await client.metric('extproc_requests_total{result="lost"}') == 2
    assert (await client.chat(tokens=2)).decision["replica_name"] == "one"


async def test_retried_request_is_answered_by_another(client: Client, stack: Stack) -> None:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as openai:
        asked = asyncio.ensure_future(
            openai.chat.completions.with_raw_response.create(
                model=MODEL,
                messages=[{"role": "user", "content": "the sea"}],
                extra_headers={"x-simulate-output-tokens": str(LONG)},
            )
        )
        await come(client, "one", 1)
        async with stopped(stack, client):
            await come(client, "two", 1)
            await client.simulate("two", slow=0.01)
            answer = await asked
    assert (answer.status_code, answer.retries_taken) == (200, 1)
    assert answer.headers["x-served-by"] == stack.address("two")


@pytest.mark.parametrize("stack", [LATE_S], indirect=True)
async def test_one_that_was_only_late_loses_nothing(client: Client, stack: Stack) -> None:
    before = await client.metric('extproc_requests_total{result="lost"}')
    request = asyncio.create_task(client.chat(tokens=LONG))
    await come(client, "one", 1)
    async with stopped(stack, client):
        await avoided(client)
    await client.simulate("one", slow=0.05)
    answer = await request
    assert (answer.status, answer.decision["replica_name"]) == (200, "one")
    assert await client.metric('extproc_requests_total{result="lost"}') == before
