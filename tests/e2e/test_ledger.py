"""The ledger holds a request until its response ends, in each body mode."""

import asyncio
import io
import json
from functools import partial

import pytest

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from extproc.request.media import LARGE_BODY
from tests.e2e.client import CHAT, MESSAGES, EnvoyClient
from tests.e2e.stack import Behind, ext_proc_of, here

UNREAD = {"serve": {"chunks_per_s": 0.0}}
"""The router reads no chunks: only the open stream shows that a response goes on."""
SHOWN_PER_S = 100  # responses of which Envoy sends the headers to the router
REPLICA = (SimulatedReplica("one", "llama-8b-a10"),)


MODES = ["BUFFERED", "FULL_DUPLEX_STREAMED"]
pytestmark = pytest.mark.parametrize("stack", MODES, indirect=True)


class BodyModeStack(Behind):
    """A stack whose Envoy sends bodies in the mode ``name``; in full duplex, after the headers."""

    name = "BUFFERED"

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        filters, settings = manager_of(bootstrap)["http_filters"], ext_proc_of(bootstrap)
        settings["processing_mode"]["request_body_mode"] = self.name
        if self.name == "FULL_DUPLEX_STREAMED":
            settings["processing_mode"]["request_header_mode"] = "SEND"
            settings["processing_mode"]["request_trailer_mode"] = "SEND"
            settings["failure_mode_allow"] = False
            filters[:] = [
                http_filter
                for http_filter in filters
                if http_filter["name"] != "envoy.filters.http.buffer"
            ]
        return bootstrap


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
