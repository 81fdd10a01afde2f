"""Collector of OpenTelemetry spans."""

from typing import Any, Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from extproc.lab.harness.processes import free_port
from tests.waiting import until


class Spans:
    """Server that receives spans by OTLP over HTTP."""

    def __init__(self) -> None:
        self.port = free_port()
        self.all: list[tuple[str, Span]] = []  # with the name of the service
        self.status = 200  # of its answers

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
        export = ExportTraceServiceRequest.FromString(await request.read())
        for sent in export.resource_spans:
            service = attributes(sent.resource)["service.name"]
            self.all += [(service, span) for scope in sent.scope_spans for span in scope.spans]
        return web.Response(status=self.status, content_type="application/x-protobuf")

    async def of(self, trace: str, count: int) -> dict[str, Span]:
        """Waits for ``count`` spans of a trace; returns them by ``service: name``."""
        await until(lambda: len(self._of(trace)) >= count)
        return self._of(trace)

    def _of(self, trace: str) -> dict[str, Span]:
        found = [(service, span) for service, span in self.all if span.trace_id.hex() == trace]
        return {f"{service}: {span.name}": span for service, span in found}


def attributes(message: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in message.attributes
    }
