"""A replica that hangs: it accepts connections and never answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import pytest
from openai import AsyncOpenAI

from extproc.lab.harness.stack import MODEL
from tests.e2e.client import CHAT, MESSAGES, EnvoyClient
from tests.e2e.stack import FAST_AND_SLOW, PatientStack, here

LONG = 3000  # tokens of a response that `one` has not finished when it is paused


class Doubting(PatientStack):
    doubts_s = 0.1


SERVE = {"hung_s": 2.0, "chunks_per_s": 1e6}
system = partial(Doubting, replicas=here(FAST_AND_SLOW, "one"), settings={"serve": SERVE})


@asynccontextmanager
async def one_hangs(client: EnvoyClient) -> AsyncIterator[None]:
    with client.stack.paused("one"):
        yield
    await client.replica_is("one", lambda now: now["healthy"] and not now["unanswered_s"])


async def test_hung_replica_is_avoided_and_its_requests_are_ended(client: EnvoyClient) -> None:
    whole = asyncio.create_task(client.chat(tokens=LONG, status=503))
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    long = {"x-simulate-output-tokens": str(LONG)}
    async with (
        aiohttp.ClientSession() as session,
        session.post(client.stack.url + CHAT, json=body, headers=long) as stream,
    ):
        await stream.content.readany()
        await client.replica_is("one", lambda now: now["in_flight"] == 2)
        async with one_hangs(client):
            await client.replica_is(
                "one", lambda now: now["healthy"] and now["unanswered_s"] >= 0.5
            )
            later = [await client.chat(tokens=2) for _ in range(10)]
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
            refused = await whole
            assert (await client.replica("one"))["in_flight"] == 0
    assert {answer.decision["replica_name"] for answer in later} == {"two"}
    assert refused.headers["Retry-After"] == "1"
    assert b"the replica that had this request hangs" in refused.body
    assert refused.decision["outcome"]["status"] == 503
    assert await client.metric('extproc_requests_total{result="lost"}') == 2
    assert (await client.chat(tokens=2)).decision["replica_name"] == "one"


async def test_retry_of_ended_request_is_served_by_other_replica(client: EnvoyClient) -> None:
    async with AsyncOpenAI(base_url=f"{client.stack.url}/v1", api_key="none") as openai:
        asked = asyncio.ensure_future(
            openai.chat.completions.with_raw_response.create(
                model=MODEL,
                messages=[{"role": "user", "content": "the sea"}],
                extra_headers={"x-simulate-output-tokens": str(LONG)},
            )
        )
        await client.replica_is("one", lambda now: now["in_flight"] == 1)
        async with one_hangs(client):
            await client.replica_is("two", lambda now: now["in_flight"] == 1)
            await client.simulate("two", slow=0.01)
            answer = await asked
    assert (answer.status_code, answer.retries_taken) == (200, 1)
    assert answer.headers["x-served-by"] == client.stack.address("two")
