import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from envoy_data_plane.envoy.config.core.v3 import Node
from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryRequest, DiscoveryResponse
from envoy_data_plane.google.rpc import Status
from grpc.aio import EOF

from extproc.envoy.xds.catalog import Catalog
from extproc.envoy.xds.server import ADS, XdsServer
from tests.waiting import PATIENCE_S


class EnvoySide:
    """One stream of a control plane, as Envoy uses it."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        self.call = call

    async def ask(
        self,
        type_url: str,
        *names: str,
        answering: DiscoveryResponse | None = None,
        refusal: str = "",
    ) -> None:
        """Subscribes; or takes the response it answers, or refuses it with a reason."""
        request = DiscoveryRequest(
            type_url=type_url,
            resource_names=list(names),
            node=Node(id="envoy-1", cluster="test"),
            response_nonce=answering.nonce if answering else "",
            version_info=answering.version_info if answering and not refusal else "",
            error_detail=Status(code=13, message=refusal) if refusal else None,
        )
        await self.call.write(bytes(request))

    async def response(self) -> DiscoveryResponse:
        """The next one, which must come."""
        async with asyncio.timeout(PATIENCE_S):
            raw = await self.call.read()
        assert raw is not EOF, "the stream ended"
        return DiscoveryResponse.parse(raw)


class ControlPlane:
    """A server on a port of its own."""

    def __init__(self, catalog: Catalog, server: XdsServer, channel: grpc.aio.Channel) -> None:
        self.catalog = catalog
        self.server = server
        self.channel = channel

    def stream(self, service: str = ADS, method: str = "StreamAggregatedResources") -> EnvoySide:
        """A new stream to it."""
        return EnvoySide(self.channel.stream_stream(f"/{service}/{method}")())


@asynccontextmanager
async def serving(catalog: Catalog) -> AsyncIterator[ControlPlane]:
    server = XdsServer(catalog)
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield ControlPlane(catalog, server, channel)
    await server.stop()


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with serving(Catalog()) as running:
        yield running
