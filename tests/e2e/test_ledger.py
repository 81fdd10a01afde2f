"""The ledger holds a request until its response ends, in each body mode."""

import asyncio
import io
import json
from collections.abc import Mapping
from functools import partial

import pytest

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from extproc.request.media import LARGE_BODY
from tests.e2e.client import CHAT, MESSAGES, EnvoyClient
from tests.e2e.stack import Behind, Change, ext_proc_of, here

UNREAD = {"serve": {"chunks_per_s": 0.0}}
"""The router reads no chunks: only the open stream shows that a response goes on."""
SHOWN_PER_S = 100  # responses of which Envoy sends the headers to the router
REPLICA = (SimulatedReplica("one", "llama-8b-a10"),)
MODES = ["envoy", "full duplex"]
pytestmark = pytest.mark.parametrize("stack", MODES, indirect=True)


def in_full_duplex(bootstrap: Bootstrap) -> None:
    """Let Envoy send the body in chunks, after the headers."""
    manager, settings = manager_of(bootstrap), ext_proc_of(bootstrap)
    settings["processing_mode"] |= {
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_header_mode": "SEND",
        "request_trailer_mode": "SEND",
    }
    settings["failure_mode_allow"] = False
    manager["http_filters"] = [
        each for each in manager["http_filters"] if each["name"] != "envoy.filters.http.buffer"
    ]


class BodyModeStack(Behind):
    cases: Mapping[str, Change] = {"full duplex": in_full_duplex}


system = partial(BodyModeStack, replicas=here(REPLICA), settings=UNREAD, pollers=0)


async def is_held(client: EnvoyClient, padding: str = "") -> None:
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "padding": padding}
    async with client.session.post(
        client.stack.url + CHAT,
        data=io.BytesIO(json.dumps(body).encode()),
        headers={"content-type": "application/json", "x-simulate-output-tokens": "4000"},
    ) as response:
        assert response.status == 200
        for _ in range(12):
            assert await response.content.readany()
            assert await client.in_flight() == 1
    await client.has_in_flight(0)


@pytest.mark.parametrize("padding", [0, LARGE_BODY + 1], ids=["small body", "unread large body"])
async def test_ledger_holds_streamed_response(client: EnvoyClient, padding: int) -> None:
    await is_held(client, "x" * padding)


async def test_ledger_holds_response_that_router_is_not_shown(client: EnvoyClient) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(SHOWN_PER_S + 50):
            tasks.create_task(client.chat(tokens=1))
    await is_held(client)
