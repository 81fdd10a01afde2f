"""Unusual clients: many slow uploads, clients that hang up, bodies with trailers."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial

import aiohttp
import pytest
import pytest_asyncio

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.stack import MODEL
from tests.e2e.client import CHAT, MESSAGES, EnvoyClient
from tests.e2e.stack import SETTINGS, Behind, PatientStack, equal_pair, here
from tests.waiting import until

REPLICAS = equal_pair()
UPLOADS = 1000
AT_ONCE = 100  # uploads that begin together
CHUNKS = 24
ENDLESS = 3000  # tokens of a response that does not end during a test
ENVOYS = ("envoy", "endpoint_picker")  # buffered bodies, and full duplex
pytestmark = pytest.mark.parametrize("stack", ENVOYS, indirect=True)


def accept_trailers(bootstrap: Bootstrap) -> None:
    """Let Envoy accept trailers of HTTP/1.1."""
    manager_of(bootstrap)["http_protocol_options"] = {"enable_trailers": True}


system = partial(
    Behind, replicas=here(REPLICAS), settings=SETTINGS, pollers=0, change=accept_trailers
)


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def nothing_left(client: EnvoyClient) -> AsyncIterator[None]:
    yield
    await client.nothing_left()
    for replica in REPLICAS:
        await client.replica_is(replica.name, lambda now: not now["running"])
    answer = await client.chat(tokens=2)
    assert answer.decision["outcome"]["served_by"] == answer.decision["replica"]


async def upload(session: aiohttp.ClientSession, port: int, half_sent: asyncio.Barrier) -> int:
    text = "sea " * 500
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    whole = json.dumps(body).encode()
    size = -(-len(whole) // CHUNKS)

    async def chunks() -> AsyncIterator[bytes]:
        for number in range(CHUNKS):
            if number == CHUNKS // 2:
                await half_sent.wait()
            yield whole[number * size :][:size]
            await asyncio.sleep(0)  # let other uploads continue

    url, headers = f"http://127.0.0.1:{port}{CHAT}", {"content-type": "application/json"}
    async with session.post(url, data=chunks(), headers=headers) as response:
        if response.status == 200:
            assert (await response.json())["usage"]["completion_tokens"] == 1
        return response.status


async def test_thousand_chunked_uploads_are_served(client: EnvoyClient) -> None:
    half_sent = asyncio.Barrier(UPLOADS + 1)
    uploads: list[asyncio.Future[int]] = []
    in_envoy = "^http.openai.downstream_rq_active$"

    async def all_open() -> bool:
        return await client.envoy_counts(in_envoy) == len(uploads)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as session:
        for _ in range(0, UPLOADS, AT_ONCE):
            some = (upload(session, client.stack.ports["envoy"], half_sent) for _ in range(AT_ONCE))
            uploads += map(asyncio.ensure_future, some)
            await until(all_open)
        await half_sent.wait()
        assert Counter(await asyncio.gather(*uploads)) == {200: UPLOADS}


REQUEST = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True}).encode()
HEAD = (
    f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    f"x-simulate-output-tokens: {ENDLESS}\r\ncontent-length: {len(REQUEST)}\r\n\r\n"
).encode()
PHASES = {
    "within the headers": HEAD[:40],
    "after the headers": HEAD,
    "within the body": HEAD + REQUEST[:20],
    "waiting": HEAD + REQUEST,
    "reading": HEAD + REQUEST,
}


@pytest.mark.parametrize("phase", PHASES)
async def test_client_that_hangs_up_leaves_nothing_behind(client: EnvoyClient, phase: str) -> None:
    async with AsyncExitStack() as closing:
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.stack.ports["envoy"])
            closing.push_async_callback(closed, writer)
            writer.write(PHASES[phase])
            await writer.drain()
            if phase == "reading":
                await reader.readuntil(b"data:")
        if phase == "waiting":
            await client.has_in_flight(10)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


WHOLE = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 2}).encode()
IMAGE = WHOLE[:-1] + b', "filler": "' + b"x" * 2**22 + b'"}'
CHUNKED = (
    f"POST {CHAT} HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n"
    "content-type: application/json\r\ntransfer-encoding: chunked\r\ntrailer: x-after\r\n\r\n"
).encode()


async def send_chunks(
    stack: PatientStack, chunks: Sequence[bytes], trailers: str = ""
) -> tuple[int, bytes]:
    """Send a chunked request with trailers; return status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.ports["envoy"])
    writer.write(CHUNKED)
    for chunk in chunks:
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        await writer.drain()
    writer.write(f"0\r\n{trailers}\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


@pytest.mark.parametrize("chunks", [[WHOLE], [WHOLE[:20], WHOLE[20:]], [IMAGE]])
async def test_body_with_trailers_is_routed(client: EnvoyClient, chunks: list[bytes]) -> None:
    routed = await client.routed()
    status, answer = await send_chunks(client.stack, chunks, "x-after: 1\r\n")
    assert status == 200, answer
    assert await client.routed() == routed + 1
