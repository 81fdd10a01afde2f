"""The ext_proc gRPC server."""

import asyncio
import logging
from collections.abc import Mapping
from math import inf
from types import MappingProxyType

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.proxy.call import Call
from extproc.proxy.exchange import Exchange
from extproc.proxy.services import Services
from extproc.proxy.stream import stream
from extproc.proxy.transport import open_port, patient

logger = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
POOL = "x-extproc-pool"  # metadata of the gRPC stream: the pool that a request is for
_UNKNOWN_REMEMBERED = 100
_NO_OTHERS: Mapping[str, Services] = MappingProxyType({})

_HEALTH_NAMES = ("", SERVICE, "readiness")
"""Envoy asks for the first or second, gateways for the last."""
_LIVENESS = "liveness"  # of the endpoint picker's protocol: one that stops still lives
_LARGEST_MESSAGE = 128 * 2**20
"""Bytes: a buffered body comes in one message, and requests carry images."""

_OPTIONS = [
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
    # A body of tens of MB arrives several times sooner than with gRPC's small windows.
    ("grpc.http2.lookahead_bytes", 16 * 2**20),
    # Two servers on one port would silently share it; an error is better.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    # An Envoy that vanished is found out, however long its streams are silent.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
]
_KEEPALIVE_S = 20.0
_READY_EVERY_S = 0.05  # seconds between two looks for a first replica
_LOOK_EVERY_S = 1.0  # seconds between two looks for replicas that hang
LAME_DUCK_S = 1.5
"""Seconds for which a router that stops still takes new streams: Envoy, as in ``envoy/*.yaml``,
asks for its health every 0.5 s, and leaves it out after two bad answers."""


class GrpcServer:
    """The gRPC server, with its health service: a stream of messages is one HTTP request.

    Handlers take and give raw bytes, so that no message is parsed twice.
    """

    def __init__(
        self,
        services: Services,
        pools: Mapping[str, Services] = _NO_OTHERS,
        keepalive_s: float = _KEEPALIVE_S,
    ) -> None:
        """A server that does not listen yet; ``pools``: services of further pools, by name.

        A peer that is silent for ``keepalive_s`` seconds is asked whether it is there. It has as
        long again to answer; then its requests are over.
        """
        self._services = services
        self._settings = serve = services.config.serve
        self._pools = {services.config.pool: services, **pools}
        self._of_none = services.of_pool(services.config)
        """For pools that do not exist: without replicas, so that Envoy's fallback policy serves."""
        self._unknown: set[str] = set()
        self._exchanges: dict[Exchange, None] = {}  # of open streams, the oldest first
        self._opened_at = -inf  # when the last stream began
        self._full = False  # streams were turned away of late
        self._stopping = False
        services.metrics.open_streams.set_function(lambda: len(self._exchanges))
        keepalive_ms = round(keepalive_s * 1000)
        options = [
            *_OPTIONS,
            ("grpc.max_concurrent_streams", serve.max_streams),  # of a connection
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            ("grpc.http2.ping_timeout_ms", keepalive_ms),  # of other pings; one is sent at a time
        ]
        with patient():
            self._server = grpc.aio.server(options=options)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        methods = {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
        handler = grpc.method_handlers_generic_handler(SERVICE, methods)
        self._server.add_generic_rpc_handlers((handler,))

    # -- the server -------------------------------------------------------------------------

    async def start(self, address: str) -> int:
        """Listens on ``host:port`` and returns the port (of use where it was 0)."""
        port = open_port(self._server, address, self._settings, "serve")
        with patient():
            await self._server.start()
        await self._health.set(_LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._report_readiness()
        return port

    async def look_after(self) -> None:
        """Reports its health once the first replica is known, for until then another router serves
        better; then ends, for ever, the requests on replicas that hang."""
        ready = False
        while True:
            await asyncio.sleep(_LOOK_EVERY_S if ready else _READY_EVERY_S)
            if ready:
                await self.end_lost()
            elif ready := self._is_ready:
                await self._report_readiness()

    async def stop(self, drain_s: float) -> None:
        """Ends within ``drain_s`` seconds.

        Its health is bad at once. It takes new streams until Envoy must have noticed, unless it is
        idle; a stream that is refused would be a request without the router, though others might be
        there. Open ones have the rest of the time to end.
        """
        self._stopping = True
        await self._report_readiness()
        idle = not self._exchanges and self._services.clock() - self._opened_at > LAME_DUCK_S
        lame_duck_s = 0.0 if idle else min(LAME_DUCK_S, drain_s)
        await asyncio.sleep(lame_duck_s)
        await self._server.stop(drain_s - lame_duck_s)

    @property
    def _is_ready(self) -> bool:
        return any(pool.fleet.members for pool in self._pools.values())

    async def _report_readiness(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        is_ready = self._is_ready and not self._stopping
        for service in _HEALTH_NAMES:
            await self._health.set(service, statuses.SERVING if is_ready else statuses.NOT_SERVING)

    # -- its streams ------------------------------------------------------------------------

    async def _process(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """One request, from its headers to the end of its response.

        An error here ends the stream, and Envoy goes on without the router.

        Envoy resets each stream that it has closed, and gRPC cancels its handler then. It never
        frees what a cancelled handler was waiting for
        (https://github.com/grpc/grpc/issues/43360): so what serves the stream is not cancelled,
        and reads that the stream has ended.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(self._serve(context, ended))
        # Its error was logged, or is of a stream that is over: asyncio need not log it, too.
        serving.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.shield(serving)
        finally:
            ended.cancel()

    async def _serve(self, context: grpc.aio.ServicerContext, ended: asyncio.Future[None]) -> None:
        if len(self._exchanges) >= self._settings.max_streams:
            await self._turn_away(context)
        if self._full and len(self._exchanges) < self._settings.max_streams // 2:
            self._full = False
            logger.info("again fewer requests are in flight than serve.max_streams allows")
        metadata, traces = context.invocation_metadata() or (), self._services.traces
        pool = next((value for key, value in reversed(metadata) if key == POOL), None)
        trace = None if traces is None else traces.begin(metadata)
        exchange = Exchange(self._services_of(pool, context), Call(context, ended), trace)
        self._exchanges[exchange] = None
        self._opened_at = self._services.clock()
        try:
            await stream(exchange)
        except DecodeError:
            logger.warning("a client sent what is no ProcessingRequest", extra=_peer(context))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a ProcessingRequest")
        except grpc.aio.BaseError:
            raise  # Envoy gave the stream up, or the server stopped: that is passed over
        except Exception:
            logger.exception("a request could not be routed; Envoy goes on without the router")
            raise
        finally:
            del self._exchanges[exchange]

    async def _turn_away(self, context: grpc.aio.ServicerContext) -> None:
        self._services.metrics.requests.add("overload")
        if not self._full:
            self._full = True
            logger.error(
                "as many requests are in flight as serve.max_streams allows: Envoy goes on with "
                "further ones without the router",
                extra={"streams": len(self._exchanges)},
            )
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests in flight")

    def _services_of(self, pool: str | None, context: grpc.aio.ServicerContext) -> Services:
        """``pool``: as Envoy's route names it in the stream's metadata, which no client can set."""
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

    async def end_lost(self) -> None:
        """Ends the requests on replicas that hang: they would last as long as clients wait."""
        if not (after := self._settings.hung_s):
            return
        fleets = (pool.fleet for pool in self._pools.values())
        hung = {one for fleet in fleets for one in fleet.eligibility.hung(after)}
        if not hung:
            return
        told = []
        for one in self._exchanges:
            try:
                answer = one.lose(hung)
            except Exception:  # this request's alone
                logger.exception("a request on a replica that hangs could not be ended")
                continue
            if answer is not None:
                told.append(one.write(answer))
        if told:
            extra = {"replicas": ", ".join(sorted(hung)), "requests": len(told)}
            logger.error("replicas hang, and what they had in flight is ended", extra=extra)
            await asyncio.gather(*told, return_exceptions=True)  # some may be over meanwhile


def _peer(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return {"peer": context.peer()}
