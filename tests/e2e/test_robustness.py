"""What clients may do: as through an Envoy of the same limits that has no router."""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.processes import free_port
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import CHAT, MESSAGES, Client
from tests.e2e.stack import Behind, Stack
from tests.waiting import until, until_read

REPLICAS = tuple(SimulatedReplica(name, "llama-8b-h100") for name in ("one", "two"))
UPLOADS = 1000
AT_ONCE = 100  # begun together
CHUNKS = 24
ENDLESS = 3000  # tokens of an answer that does not end during a test
ENVOYS = ("envoy", "endpoint_picker")  # bodies in one piece, and in full duplex
pytestmark = [
    pytest.mark.process,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("stack", ENVOYS, indirect=True),
]


class Doubled(Behind):
    """System whose Envoy takes trailers of HTTP/1.1, and asks no router on a second port."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, REPLICAS, {"serve": {"chunks_per_s": 1e6}})
        self.ports = {**self.ports, "alone": free_port()}

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        manager_of(bootstrap)["http_protocol_options"] = {"enable_trailers": True}
        (listener,) = bootstrap["static_resources"]["listeners"]
        alone = copy.deepcopy(listener)
        alone["name"] = "alone"
        alone["address"]["socket_address"]["port_value"] = self.ports["alone"]
        manager = alone["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"] = [
            one for one in manager["http_filters"] if not one["name"].endswith("ext_proc")
        ]
        bootstrap["static_resources"]["listeners"].append(alone)
        return bootstrap


def system(directory: Path) -> Stack:
    return Doubled(directory)


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def nothing_left(client: Client) -> AsyncIterator[None]:
    yield
    await client.ledger_empty()

    async def idle() -> bool:
        held = [
            await client.metric(f"extproc_{name}")
            for name in ("open_streams", "requests_in_flight")
        ]
        running = [(await client.replica(one.name))["running"] for one in REPLICAS]
        return not any(held + running)

    await until(idle)
    answer = await client.chat(tokens=2)
    assert answer.status == 200
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
            await asyncio.sleep(0)  # the others' turn

    url, headers = f"http://127.0.0.1:{port}{CHAT}", {"content-type": "application/json"}
    async with session.post(url, data=chunks(), headers=headers) as response:
        if response.status == 200:
            assert (await response.json())["usage"]["completion_tokens"] == 1
        return response.status


async def in_envoy(client: Client) -> int:
    return await client.envoy_counts("^http.openai.downstream_rq_active$")


@pytest.mark.parametrize("door", ["alone", "envoy"])
async def test_thousand_uploads_in_small_chunks(stack: Stack, client: Client, door: str) -> None:
    half_sent = asyncio.Barrier(UPLOADS + 1)
    uploads: list[asyncio.Future[int]] = []

    async def all_open() -> bool:
        return await in_envoy(client) == len(uploads)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as session:
        for _ in range(0, UPLOADS, AT_ONCE):
            some = (upload(session, stack.ports[door], half_sent) for _ in range(AT_ONCE))
            uploads += map(asyncio.ensure_future, some)
            if door == "envoy":
                await until(all_open)
        await half_sent.wait()
        assert Counter(await asyncio.gather(*uploads)) == {200: UPLOADS}


async def curl(port: int, *arguments: str) -> tuple[str, str]:
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", f"http://127.0.0.1:{port}{CHAT}", "-o", "/dev/null",
        "-w", "%{http_version} %{response_code}", "-H", "content-type: application/json",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    version, status = output.decode().split()
    return version, status


BODY = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 2})


def headers_of(kilobytes: int) -> list[str]:
    value = "v" * (kilobytes * 1024 // 8 - 20)  # a replica takes lines of 8 kB
    return [word for number in range(8) for word in ("-H", f"x-large-{number}: {value}")]


@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_headers_up_to_envoys_limit_of_60_kb(stack: Stack, version: str) -> None:
    way = {"1.1": "--http1.1", "2": "--http2-prior-knowledge"}[version]
    for door in ("alone", "envoy"):
        answer = await curl(stack.ports[door], way, "-d", BODY, *headers_of(59))
        assert answer == (version, "200"), door
        _, status = await curl(stack.ports[door], way, "-d", BODY, *headers_of(64))
        assert status != "200", door  # 431, or the connection is closed before it is sent


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
async def test_clients_that_close_over_http_1(stack: Stack, client: Client, phase: str) -> None:
    async with AsyncExitStack() as closing:
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.ports["envoy"])
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


@pytest.mark.parametrize("phase", ["within the body", "waiting", "reading"])
async def test_clients_that_close_over_http_2(stack: Stack, client: Client, phase: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "curl", "-sSN", "--http2-prior-knowledge", f"{stack.url}{CHAT}", "-X", "POST", "-T", "-",
        "-H", "content-type: application/json", "-H", "expect:",
        "-H", f"x-simulate-output-tokens: {ENDLESS}",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    process.stdin.write(REQUEST[:20] if phase == "within the body" else REQUEST)
    await process.stdin.drain()
    if phase == "within the body":
        await until_read(lambda: in_envoy(client), lambda now: now == 1)
    else:
        process.stdin.close()
        if phase == "reading":
            await process.stdout.readuntil(b"data:")
        else:
            await client.has_in_flight(1)
    process.kill()
    await process.communicate()


WHOLE = BODY.encode()
IMAGE = WHOLE[:-1] + b', "filler": "' + b"x" * 2**22 + b'"}'
CHUNKED = (
    f"POST {CHAT} HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n"
    "content-type: application/json\r\ntransfer-encoding: chunked\r\ntrailer: x-after\r\n\r\n"
).encode()


async def send_chunks(
    stack: Stack, chunks: Sequence[bytes], trailers: str = ""
) -> tuple[int, bytes]:
    """Sends a request in these chunks, with these trailers; returns status and answer."""
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
async def test_body_with_trailers(stack: Stack, client: Client, chunks: list[bytes]) -> None:
    routed = await client.routed(stack.router_admin)
    status, answer = await send_chunks(stack, chunks, "x-after: 1\r\n")
    assert status == 200, answer
    assert await client.routed(stack.router_admin) == routed + 1
