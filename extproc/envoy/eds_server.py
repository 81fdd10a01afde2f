"""EDS over gRPC (state of the world): Envoy names pools and receives their replicas.

Protocol: https://www.envoyproxy.io/docs/envoy/latest/api-docs/xds_protocol
"""

import asyncio
import hashlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache

import grpc
from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryRequest, DiscoveryResponse
from envoy_data_plane.google.protobuf import Any
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.config import MutualTlsSettings
from extproc.proxy.transport import credentials_of, open_port

logger = logging.getLogger(__name__)

ENDPOINTS = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
SERVICE, METHOD = "envoy.service.endpoint.v3.EndpointDiscoveryService", "StreamEndpoints"
_OPTIONS = [
    # By default, two servers could listen on one port, and each would get some connections.
    ("grpc.so_reuseport", 0),
    # Streams are quiet for hours; only pings find an Envoy whose machine is gone.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
]
_SETTLE_S = 0.05  # changes within this time reach Envoy together

Assignments = Mapping[str, Callable[[], bytes] | None]
"""By pool, the function that returns its ``ClusterLoadAssignment``; None: no replica is known."""


class Subscription:
    """Pools that Envoy subscribed to on one stream, and the last response sent there."""

    def __init__(self, pools: Assignments, peer: str) -> None:
        self._pools = pools
        self._envoy = {"peer": peer, "node": ""}
        self._names: frozenset[str] = frozenset()
        self.sent: dict[str, bytes] = {}
        self._nonces = itertools.count(1)
        self._nonce = ""
        self.woken = asyncio.Event()  # set when a response may be due

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Handle requests until Envoy closes the stream; raises ValueError for another message."""
        async for raw in requests:
            try:
                request = DiscoveryRequest.parse(raw)
            except Exception as error:  # the package may raise anything on invalid bytes
                raise ValueError("not a DiscoveryRequest") from error
            self.take(request)
            self.woken.set()

    def take(self, request: DiscoveryRequest) -> None:
        """Handle a request: the first subscribes, later requests acknowledge or change names."""
        if request.node is not None and request.node.id:
            self._envoy["node"] = request.node.id
        if request.response_nonce != self._nonce:
            return  # Envoy sent this request before it got the last response
        names = frozenset(request.resource_names)
        if unknown := sorted(names - self._names - self._pools.keys()):
            pools = {"requested": ", ".join(unknown), "served": ", ".join(self._pools)}
            logger.warning(
                "envoy asks for pools that are not configured: add them to 'pools'",
                extra=pools | self._envoy,
            )
        self._names = names
        if request.error_detail is not None:  # Envoy reports each error once
            logger.error(
                "envoy refused a list of replicas and keeps the old list",
                extra=self._envoy | {"reason": request.error_detail.message},
            )

    def due(self) -> DiscoveryResponse | None:
        """Return a response if the assignments differ from the last response; otherwise None."""
        names = sorted(self._names)
        selected = {name: encode() for name in names if (encode := self._pools.get(name))}
        if not selected or selected == self.sent:
            return None
        self.sent = selected
        self._nonce = str(next(self._nonces))
        whole = b"".join(len(data).to_bytes(8) + data for data in selected.values())
        return DiscoveryResponse(
            version_info=hashlib.sha256(whole).hexdigest()[:16],  # equal on all servers
            resources=[Any(type_url=ENDPOINTS, value=data) for data in selected.values()],
            type_url=ENDPOINTS,
            nonce=self._nonce,
        )


class EdsServer:
    """gRPC server that answers EDS requests, and health checks."""

    def __init__(self, pools: Assignments, files: MutualTlsSettings) -> None:
        """Raises ValueError if a TLS file cannot be used."""
        self._pools = dict(pools)
        self.known = asyncio.Event()  # the replicas of any pool are known
        self._credentials = credentials_of(files, "eds")
        self.streams: dict[asyncio.Task[None], Subscription] = {}  # by the task that reads
        self._health = health.aio.HealthServicer()

    async def start(self, address: str) -> int:
        """Listen on ``host:port`` and return the port. After an error no gRPC server is left."""
        stream = grpc.stream_stream_rpc_method_handler(self._stream)
        handler = grpc.method_handlers_generic_handler(SERVICE, {METHOD: stream})
        server = grpc.aio.server(options=_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_generic_rpc_handlers((handler,))
        port = open_port(server, address, self._credentials, "eds")
        await server.start()
        self._server = server
        await self.report(serving=True)
        return port

    def put(self, pool: str, encode: Callable[[], bytes]) -> None:
        """Tell a pool's replicas to each Envoy that subscribed to the pool.

        All streams share one call of ``encode``, which the first response calls.
        """
        self._pools[pool] = cache(encode)
        self.known.set()
        for subscription in self.streams.values():
            subscription.woken.set()

    async def report(self, serving: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        for service in ("", SERVICE):
            await self._health.set(service, statuses.SERVING if serving else statuses.NOT_SERVING)

    def close_streams(self) -> None:
        """Close all streams: each Envoy keeps its replicas and asks a healthy server."""
        for reading in self.streams:
            reading.cancel()

    async def stop(self) -> None:
        """Stop listening and close all streams; each Envoy keeps its replicas."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(None)

    async def _stream(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        subscription = Subscription(self._pools, context.peer())
        reading = asyncio.create_task(subscription.read(requests))
        reading.add_done_callback(lambda _: subscription.woken.set())
        self.streams[reading] = subscription
        try:
            while not reading.done():
                # If Envoy reads slowly, it gets only the newest response.
                if (response := subscription.due()) is not None:
                    yield bytes(response)
                await subscription.woken.wait()
                if subscription.sent:
                    await asyncio.sleep(_SETTLE_S)
                subscription.woken.clear()
            if reading.cancelled():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "redis lost: ask another instance")
            await reading
        except ValueError:
            logger.warning(
                "stream closed: message is not a DiscoveryRequest", extra={"peer": context.peer()}
            )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a DiscoveryRequest")
        finally:
            del self.streams[reading]
            reading.cancel()
