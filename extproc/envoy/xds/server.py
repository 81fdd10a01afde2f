"""The gRPC services that Envoy subscribes to: all types on one stream (ADS), or each on its own."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryRequest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.config import TlsFiles
from extproc.envoy.xds.catalog import Catalog
from extproc.envoy.xds.subscriptions import Subscriptions
from extproc.proxy import tls

logger = logging.getLogger(__name__)

ADS = "envoy.service.discovery.v3.AggregatedDiscoveryService"
_METHODS = {
    ADS: "StreamAggregatedResources",
    "envoy.service.cluster.v3.ClusterDiscoveryService": "StreamClusters",
    "envoy.service.endpoint.v3.EndpointDiscoveryService": "StreamEndpoints",
    "envoy.service.listener.v3.ListenerDiscoveryService": "StreamListeners",
    "envoy.service.route.v3.RouteDiscoveryService": "StreamRoutes",
}

_OPTIONS = [
    # Two servers on one port would silently share it; an error is better.
    ("grpc.so_reuseport", 0),
    # Streams are quiet for hours: an Envoy whose machine is gone is noticed all the same.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
]
_PLAIN = TlsFiles()


class XdsServer:
    """Serves a catalog, and the health service."""

    def __init__(self, catalog: Catalog, files: TlsFiles = _PLAIN) -> None:
        self._catalog = catalog
        self._files = files
        self._streams: set[asyncio.Task[None]] = set()
        self._server = grpc.aio.server(options=_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        stream = grpc.stream_stream_rpc_method_handler(self._stream)
        self._server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(service, {method: stream})
                for service, method in _METHODS.items()
            )
        )

    async def start(self, address: str) -> int:
        """Listens on ``host:port`` and returns the port (of use where it was 0)."""
        port = tls.open_port(self._server, address, self._files, "xds")
        await self._server.start()
        await self.report(serving=True)
        return port

    async def report(self, serving: bool) -> None:
        """What health checks are answered. Streams are served either way."""
        kinds = health_pb2.HealthCheckResponse
        for service in ("", *_METHODS):
            await self._health.set(service, kinds.SERVING if serving else kinds.NOT_SERVING)

    def send_away(self) -> None:
        """Ends the streams there are. Envoy keeps what it has, and asks whom its health checks
        leave."""
        for stream in self._streams:
            stream.cancel()

    async def stop(self) -> None:
        """Ends all streams; Envoy goes on with what it has."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(None)

    async def _stream(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        subscriptions = Subscriptions(self._catalog, context.peer())
        woken = asyncio.Event()
        reading = asyncio.create_task(_read(requests, subscriptions, woken))
        reading.add_done_callback(lambda _: woken.set())
        self._streams.add(reading)
        try:
            with self._catalog.watched_by(woken):
                while not reading.done():
                    # Only the newest is sent, however slowly Envoy reads.
                    for response in subscriptions.due():
                        yield bytes(response)
                    await woken.wait()
                    woken.clear()
            if reading.cancelled():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut off from redis: ask another")
            await reading
        except ValueError:
            logger.warning(
                "a client sent what is no DiscoveryRequest", extra={"peer": context.peer()}
            )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a DiscoveryRequest")
        finally:
            self._streams.discard(reading)
            reading.cancel()


async def _read(
    requests: AsyncIterator[bytes], subscriptions: Subscriptions, woken: asyncio.Event
) -> None:
    async for raw in requests:
        subscriptions.take(_parsed(raw))
        woken.set()


def _parsed(raw: bytes) -> DiscoveryRequest:
    try:
        return DiscoveryRequest.parse(raw)
    except Exception as error:  # of any kind: the package looks at no byte before it uses it
        raise ValueError("not a DiscoveryRequest") from error
