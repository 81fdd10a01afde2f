"""The ext_proc gRPC server."""

import logging
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.server.exchange import Exchange, Services
from extproc.server.proto.ext_proc_pb2 import ProcessingRequest

logger = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
POOL = "x-extproc-pool"
"""Metadata of the gRPC stream: the pool that a request is for."""
_UNKNOWN_REMEMBERED = 100
_NO_OTHERS: Mapping[str, Services] = MappingProxyType({})

_HEALTH_NAMES = ("", SERVICE, "liveness", "readiness")
"""Envoy asks for the first or second, gateways for the others."""
_LARGEST_MESSAGE = 128 * 2**20
"""Bytes: a buffered body comes in one message, and requests carry images."""

_OPTIONS = [
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
    # A body of tens of MB arrives several times sooner than with gRPC's small windows.
    ("grpc.http2.lookahead_bytes", 16 * 2**20),
    # Every request in flight holds a stream of Envoy's few connections.
    ("grpc.max_concurrent_streams", 2**31 - 1),
    # Two servers on one port would silently share it; an error is better.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
]


class ExternalProcessor:
    """Serves ``Process``: a stream of messages is one HTTP request.

    Handlers take and give raw bytes, so that no message is parsed twice.
    """

    def __init__(self, services: Services, pools: Mapping[str, Services] = _NO_OTHERS) -> None:
        """Takes the services of the configuration's own pool, and those of others by name."""
        self._services = services
        self._pools = {services.config.pool: services, **pools}
        self._of_none = services.of_pool(services.config)
        """For pools that do not exist: without replicas, so that Envoy's fallback policy serves."""
        self._unknown: set[str] = set()

    async def process(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """One request, from its headers to the end of its response.

        An error here ends the stream, and Envoy goes on without the router.
        """
        exchange = Exchange(self._asked_for(context))
        open_streams = self._services.metrics.open_streams
        open_streams.inc()
        try:
            async for raw in requests:
                for reply in exchange.answer(ProcessingRequest.FromString(raw)):
                    yield reply
        except DecodeError:
            logger.warning("a client sent what is no ProcessingRequest", extra=_peer(context))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a ProcessingRequest")
        except Exception:
            logger.exception("a request could not be routed; Envoy goes on without the router")
            raise
        finally:
            open_streams.dec()
            exchange.close()

    def _asked_for(self, context: grpc.aio.ServicerContext) -> Services:
        """The pool that Envoy's route names in the stream's metadata, which no client can set."""
        metadata = context.invocation_metadata() or ()
        pool = next((value for key, value in reversed(metadata) if key == POOL), None)
        if pool is None:
            return self._services
        if pool in self._pools:
            return self._pools[pool]
        if pool not in self._unknown and len(self._unknown) < _UNKNOWN_REMEMBERED:
            self._unknown.add(pool)
            known = ", ".join(self._pools)
            logger.error(
                "an Envoy route names a pool that is not configured, so Envoy's fallback serves",
                extra={"pool": pool, "configured": known} | _peer(context),
            )
        return self._of_none

    def handler(self) -> grpc.GenericRpcHandler:
        """The handler to add to a gRPC server."""
        process = grpc.stream_stream_rpc_method_handler(self.process)
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})


def _peer(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return {"peer": context.peer()}


class GrpcServer:
    """The gRPC server with its health service."""

    def __init__(self, services: Services, pools: Mapping[str, Services] = _NO_OTHERS) -> None:
        """Takes the services of the configuration's own pool, and those of others by name."""
        self._server = grpc.aio.server(options=_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers((ExternalProcessor(services, pools).handler(),))

    async def start(self, address: str) -> int:
        """Listens on ``host:port`` and returns the port (of use where it was 0).

        Raises:
            OSError: the address cannot be listened on.
        """
        try:
            port: int = self._server.add_insecure_port(address)
        except RuntimeError:  # its message says no more
            raise OSError(
                f"cannot listen for Envoy on {address} (serve.listen): "
                "it is taken, or not an address of this machine"
            ) from None
        await self._server.start()
        await self._report(health_pb2.HealthCheckResponse.SERVING)
        return port

    async def stop(self, drain_s: float) -> None:
        """Takes no new streams, and gives the open ones ``drain_s`` seconds to end."""
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.stop(drain_s)

    async def _report(self, status: int) -> None:
        for service in _HEALTH_NAMES:
            await self._health.set(service, status)
