"""A replica that hangs: it accepts connections and never answers."""

import asyncio
from functools import partial

import aiohttp
import pytest

from extproc.lab.harness.stack import MODEL
from tests.e2e.client import CHAT, MESSAGES, EnvoyClient
from tests.e2e.stack import FAST_AND_SLOW, PatientStack, here

LONG = 3000  # tokens of a response that `one` has not finished when it is paused


class Doubting(PatientStack):
    doubts_s = 0.1


SERVE = {"hung_s": 2.0, "chunks_per_s": 1e6}
system = partial(Doubting, replicas=here(FAST_AND_SLOW, "one"), settings={"serve": SERVE})


async def test_hung_replica_is_avoided_and_its_requests_are_ended(client: EnvoyClient) -> None:
    whole = asyncio.create_task(client.chat(tokens=LONG, status=503))
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    long = {"x-simulate-output-tokens": str(LONG)}
    url = client.stack.url + CHAT
    async with client.session.post(url, json=body, headers=long) as stream:
        await stream.content.readany()
        await client.replica_is("one", lambda now: now["in_flight"] == 2)
        with client.stack.paused("one"):
            await client.replica_is(
                "one", lambda now: now["healthy"] and now["unanswered_s"] >= 0.5
            )
            later = [await client.chat(tokens=2) for _ in range(10)]
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
            refused = await whole
            assert (await client.replica("one"))["in_flight"] == 0
        await client.replica_is("one", lambda now: now["healthy"] and not now["unanswered_s"])
    assert {answer.decision["replica_name"] for answer in later} == {"two"}
    assert refused.headers["Retry-After"] == "1"
    assert b"the replica that had this request hangs" in refused.body
    assert refused.decision["outcome"]["status"] == 503
    assert await client.metric('extproc_requests_total{result="lost"}') == 2
    assert (await client.chat(tokens=2)).decision["replica_name"] == "one"
