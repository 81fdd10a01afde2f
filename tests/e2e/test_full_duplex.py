"""Bodies in full duplex through a real Envoy, as gateways send them: with trailers, and large."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import CHAT, MESSAGES, Client
from tests.e2e.stack import Stack, bootstrap_of

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

REPLICAS = tuple(SimulatedReplica(name, "llama-8b-h100") for name in ("one", "two"))
ASKED = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
BODY = json.dumps(ASKED).encode()
IMAGE = json.dumps(ASKED | {"filler": "x" * 2**22}).encode()
HEAD = (
    f"POST {CHAT} HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n"
    "content-type: application/json\r\ntransfer-encoding: chunked\r\ntrailer: x-after\r\n\r\n"
)


class FullDuplex(Stack):
    """Runs envoy/endpoint_picker.yaml, and takes trailers of HTTP/1.1, too."""

    def _bootstrap(self) -> Bootstrap:
        bootstrap = bootstrap_of(self, "endpoint_picker")
        manager_of(bootstrap)["http_protocol_options"] = {"enable_trailers": True}
        return bootstrap


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FullDuplex]:
    async with FullDuplex(tmp_path_factory.mktemp("full-duplex"), REPLICAS) as running:
        yield running


async def ask(stack: Stack, chunks: Sequence[bytes], trailers: str = "") -> tuple[int, bytes]:
    """Sends a request in these chunks, with these trailers; returns status and answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.ports["envoy"])
    writer.write(HEAD.encode())
    for chunk in chunks:
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        await writer.drain()
    writer.write(f"0\r\n{trailers}\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


@pytest.mark.parametrize("chunks", [[BODY], [BODY[:20], BODY[20:]], [IMAGE]])
async def test_body_with_trailers(stack: FullDuplex, client: Client, chunks: list[bytes]) -> None:
    routed = await client.routed(stack.router_admin)
    status, answer = await ask(stack, chunks, "x-after: 1\r\n")
    assert status == 200, answer
    assert await client.routed(stack.router_admin) == routed + 1
    await client.ledger_empty()
