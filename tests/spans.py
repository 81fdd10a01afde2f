"""Spans that were sent, as they arrive."""

from typing import Any, Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from extproc.lab.harness.processes import free_port
from tests.waiting import until


class Spans:
    """Takes what a router, or a collector, sends by OTLP over HTTP."""

    def __init__(self) -> None:
        self.port = free_port()
        self.all: list[tuple[str, Span]] = []  # each with the name of its service
        self.status = 200  # that it answers

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        told = ExportTraceServiceRequest.FromString(await request.read())
        for one in told.resource_spans:
            service = attributes(one.resource)["service.name"]
            self.all += [(service, span) for scope in one.scope_spans for span in scope.spans]
        return web.Response(status=self.status, content_type="application/x-protobuf")

    async def of(self, trace: str, count: int) -> dict[str, Span]:
        """So many of a trace, by service and name, once they are there."""
        await until(lambda: len(self._of(trace)) >= count)
        return self._of(trace)

    def _of(self, trace: str) -> dict[str, Span]:
        found = [(service, one) for service, one in self.all if one.trace_id.hex() == trace]
        return {f"{service}: {one.name}": one for service, one in found}


def attributes(one: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in one.attributes
    }
