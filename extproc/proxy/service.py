"""The ext_proc gRPC server."""

import asyncio
import logging
from dataclasses import replace

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.ground.outage_log import OutageLog
from extproc.proxy.call import Call
from extproc.proxy.exchange import Exchange
from extproc.proxy.services import Services
from extproc.proxy.stream import stream
from extproc.proxy.transport import batch_scheduled_threads, credentials_of, open_port

logger = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
POOL = "x-extproc-pool"  # metadata of the gRPC stream: the pool that a request is for

_READINESS = "", SERVICE, "readiness"
"""Health services for readiness: Envoy asks for one of the first two, gateways for the last."""
_LIVENESS = "liveness"  # in the endpoint picker's protocol; stays good while the router stops
_LARGEST_MESSAGE = 128 * 2**20
"""Bytes. A buffered body comes in one message, and may contain images."""

_OPTIONS = [
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
    # A body of tens of MB arrives several times sooner than with gRPC's small default windows.
    ("grpc.http2.lookahead_bytes", 16 * 2**20),
    # Two servers would silently share one port; an error is better.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    # Any number of pings while all streams are silent: so gRPC detects an Envoy that vanished.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
]
_REFUSES = "requests refused at serve.max_streams: Envoy serves them without this router"
_ACCEPTS = "requests accepted again: fewer than half of serve.max_streams are open"
_CHECK_READINESS_EVERY_S = 0.05
_CHECK_HUNG_EVERY_S = 1.0
LAME_DUCK_S = 1.5
"""Seconds for which a stopping router still accepts new streams. Envoy checks the router's health
every 0.5 s (``envoy/*.yaml``) and excludes the router after two failed checks."""


class GrpcServer:
    """The gRPC server and its health service. Each stream is one HTTP request.

    Handlers receive and return raw bytes, so that no message is parsed twice.
    """

    _server: grpc.aio.Server  # since :meth:`start`

    def __init__(self, *pools: Services, keepalive_s: float = 20.0) -> None:
        """Creates a server that does not listen yet; the first pool serves streams that name none.

        The server pings an Envoy that was silent for ``keepalive_s`` seconds, and ends its requests
        if no answer comes within the same time.
        """
        self._services = services = pools[0]
        self._settings = serve = services.config.serve
        self._pools = pools
        self._by_name: dict[str | None, Services] = {pool.config.pool: pool for pool in pools}
        self._by_name[None] = services
        self._unknown_pool = replace(services.of_pool(services.config), recorder=None)
        """Services without replicas, for unknown pools: Envoy's fallback serves their requests."""
        self._exchanges: dict[Exchange, None] = {}  # of open streams, the oldest first
        self._overload = OutageLog(logger, _REFUSES, _ACCEPTS, level=logging.ERROR)
        self._was_ready = self._stopping = False
        services.metrics.open_streams.set_function(lambda: len(self._exchanges))
        keepalive_ms = round(keepalive_s * 1000)
        self._options = [
            *_OPTIONS,
            ("grpc.max_concurrent_streams", serve.max_streams),  # per connection
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            ("grpc.http2.ping_timeout_ms", keepalive_ms),  # of any ping; only one is open at a time
        ]
        self._health = health.aio.HealthServicer()

    # -- the server -------------------------------------------------------------------------

    async def start(self, address: str) -> int:
        """Listens on ``host:port``; returns the port, which the system chooses for port 0.

        After an error no gRPC server is left: at exit, gRPC prints an error about each server that
        was never stopped.

        Raises:
            OSError: the address cannot be listened on.
            ValueError: a TLS file cannot be used.
        """
        methods = {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
        handler = grpc.method_handlers_generic_handler(SERVICE, methods)
        with batch_scheduled_threads():
            server = grpc.aio.server(options=self._options)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            server.add_generic_rpc_handlers((handler,))
            credentials = credentials_of(self._settings, "serve")
            port = open_port(server, address, credentials, "serve")
            await server.start()
        self._server = server
        await self._health.set(_LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._report_readiness()
        return port

    async def watch_replicas(self) -> None:
        """Reports the health service as ready once the router knows the replicas of a pool; from
        then on, ends requests on hung replicas.

        Until the router is ready, Envoy uses other routers. Runs until cancelled.
        """
        ready = False
        while True:
            await asyncio.sleep(_CHECK_HUNG_EVERY_S if ready else _CHECK_READINESS_EVERY_S)
            if ready:
                self.end_hung()
            elif ready := not self.unready():
                await self._report_readiness()
                logger.info(
                    "router ready: it knows the replicas",
                    extra={"mode": self._settings.mode, "share": self._settings.share},
                )

    async def stop(self, drain_s: float) -> None:
        """Stops the server; open streams have ``drain_s`` seconds to end.

        Health checks fail at once. New streams are accepted until Envoy must have noticed the
        failed checks: Envoy serves the request of a refused stream without the router or, in full
        duplex, answers 500.
        """
        self._stopping = True
        await self._report_readiness()
        lame_duck_s = min(LAME_DUCK_S, drain_s)
        await asyncio.sleep(lame_duck_s)
        await self._server.stop(drain_s - lame_duck_s)

    def unready(self) -> str:
        """Returns why the router should get no requests, or an empty string if the router is ready.

        A router becomes ready once it knows a replica, even if the replica does not answer, or
        knows that a pool is empty, whose requests wait for a replica. A ready router stays ready
        if it loses Redis, pollers or replicas.
        """
        if self._stopping:
            return "stopping"
        self._was_ready = self._was_ready or any(pool.fleet.is_known for pool in self._pools)
        return "" if self._was_ready else "no replica is known yet"

    async def _report_readiness(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.NOT_SERVING if self.unready() else statuses.SERVING
        for service in _READINESS:
            await self._health.set(service, status)

    # -- the streams ------------------------------------------------------------------------

    async def _process(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """Serves one stream; after an error, Envoy goes on without the router.

        gRPC cancels this handler when Envoy resets the stream, and Envoy also resets every stream
        that it has closed. The cancellation ends ``ended``, and not the task that serves the
        stream, by the invariant of :class:`~extproc.proxy.call.Call`. The task then reads the end
        of the stream.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(self._serve(context, ended))

        def served(task: asyncio.Task[None]) -> None:
            # ``_serve`` has logged its errors: retrieve them, or asyncio logs them again.
            if not task.cancelled():
                task.exception()
            if not ended.done():
                ended.set_result(None)

        serving.add_done_callback(served)
        await ended
        serving.result()

    async def _serve(self, context: grpc.aio.ServicerContext, ended: asyncio.Future[None]) -> None:
        if len(self._exchanges) >= self._settings.max_streams:
            self._services.metrics.requests.add("overload")
            self._overload.failed(f"{len(self._exchanges)} streams are open")
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests in flight")
        if len(self._exchanges) < self._settings.max_streams // 2:
            self._overload.recovered()
        metadata, traces = context.invocation_metadata() or (), self._services.traces
        pool = next((value for key, value in reversed(metadata) if key == POOL), None)
        trace = None if traces is None else traces.begin(metadata)
        exchange = Exchange(self._services_of(pool, context), Call(context, ended), trace)
        self._exchanges[exchange] = None
        try:
            await stream(exchange)
        except DecodeError:
            text = "stream closed: message is not a ProcessingRequest"
            logger.warning(text, extra={"peer": context.peer()})
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a ProcessingRequest")
        except grpc.aio.BaseError:
            raise  # Envoy gave the stream up, or the server stopped
        except Exception:
            logger.exception("error in a stream: Envoy serves its request without this router")
            raise
        finally:
            del self._exchanges[exchange]

    def _services_of(self, pool: str | None, context: grpc.aio.ServicerContext) -> Services:
        """Returns the services of the pool that Envoy's route names in the stream's metadata, which
        no client can set."""
        if pool not in self._by_name:
            configured = ", ".join(each.config.pool for each in self._pools)
            logger.error(
                "an Envoy route names a pool that is not configured: Envoy's fallback serves its "
                "requests; add the pool to 'pools', or correct the route",
                extra={"pool": pool, "configured": configured, "peer": context.peer()},
            )
            self._by_name[pool] = self._unknown_pool  # as many as Envoy's configuration names
        return self._by_name[pool]

    def end_hung(self) -> None:
        """Ends the requests on hung replicas. Otherwise these requests would last until their
        clients give up. Does not wait for the writes, because an Envoy may read nothing."""
        if not (after := self._settings.hung_s):
            return
        hung = {
            replica: pool.fleet.members.title(replica)
            for pool in self._pools
            for replica in pool.fleet.eligibility.hung(after)
        }
        if not hung:
            return
        writes = []
        for exchange in self._exchanges:
            try:
                if answer := exchange.end_if_hung(hung):
                    writes.append(exchange.write(answer))
            except Exception:  # the other requests must end all the same
                logger.exception("a request on a hung replica could not be ended")
        if writes:
            count, replicas = len(writes), ", ".join(sorted(hung.values()))
            logger.error(f"ended {count} requests on hung replicas {replicas}")
            asyncio.gather(*writes, return_exceptions=True)  # streams may end meanwhile
