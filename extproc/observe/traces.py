"""OpenTelemetry spans of a request: the decision, then the work of its replica."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from os import getpid
from socket import gethostname
from threading import Thread
from typing import TYPE_CHECKING

from extproc.ground.address import split_address
from extproc.ground.clock import monotonic
from extproc.observe.decision import RequestOutcome
from extproc.observe.decision_log import TERMS, summary_of
from extproc.request.endpoint import Endpoint
from extproc.route.decision import Decision

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

Attributes = dict[str, str | int | float | None]

_PATH = "/v1/traces"  # of OTLP over HTTP
_NOT_SAMPLED = "-00"  # flags at the end of a `traceparent`
_FLUSH_S = 2.0  # limit for sending the last spans at the stop: the collector may be gone
_FAILURE_EVERY_S = 60.0
_OPERATIONS = {  # `gen_ai.operation.name` by the semantic conventions of OpenTelemetry
    **dict.fromkeys((Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES), "chat"),
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
}


class _Sparse(logging.Filter):
    """Log filter that passes one error per minute, because the SDK logs an error for each failed
    batch, every few seconds."""

    _next_at = -inf

    def filter(self, record: logging.LogRecord) -> bool:
        now = monotonic()
        if record.levelno < logging.ERROR or now < self._next_at:
            return False
        self._next_at = now + _FAILURE_EVERY_S
        return True


_SPARSE = _Sparse()


class Traces:
    """Sends spans to a collector, from a thread of the SDK.

    Envoy's span decides whether a request is sampled. The SDK's environment variables apply
    (``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS`` and the like).

    Args:
        endpoint: base URL of a collector (OTLP over HTTP).

    Raises:
        ValueError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ValueError(
                "traces.endpoint is set, but OpenTelemetry is not installed: "
                "pip install 'extproc[traces]'"
            ) from None
        own = {"service.name": "extproc", "service.instance.id": f"{gethostname()}/{getpid()}"}
        resource = Resource(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = trace_exporter.OTLPSpanExporter(endpoint.rstrip("/") + _PATH)
        logging.getLogger(trace_exporter.__name__).addFilter(_SPARSE)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("extproc")
        self._parent = TraceContextTextMapPropagator().extract

    def begin(self, metadata: Iterable[tuple[str, str | bytes]]) -> "Trace | None":
        """Start the trace of a request; returns None for a request that is not sampled.

        ``metadata``: metadata of the gRPC stream, in which Envoy names its span; no client can set
        it.
        """
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        if carrier.get("traceparent", "").endswith(_NOT_SAMPLED):
            return None  # the usual case, decided in a tenth of the SDK's time
        parent = self._parent(carrier)
        span = self._tracer.start_span("route", parent)
        return Trace(self._tracer, parent, span) if span.is_recording() else None

    def close(self) -> None:
        """Send the last spans; return after 4 s at most."""
        flush = Thread(target=self._provider.shutdown, daemon=True)
        flush.start()
        flush.join(_FLUSH_S)
        if flush.is_alive():
            # Ends the exporter's retries and thereby the thread.
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # in the SDK
            flush.join(_FLUSH_S)


@dataclass(eq=False)
class Trace:
    """The two consecutive spans of a request: ``route``, and the replica's work.

    ``route`` lasts until the request is dispatched or refused, the other span until the response
    ends. If the request is no inference request, ``route`` never ends, and the SDK sends no span.
    """

    _tracer: "Tracer"
    _parent: "Context"
    _route: "Span"
    _request: "Span | None" = field(default=None, init=False)  # the replica's work

    def queued(self, why: str) -> None:
        self._route.add_event("queued", {"why": why})

    def sent(self, decision: Decision, request_id: str, pool: str, waited: float) -> None:
        """End ``route`` and begin the replica's span; ``waited``: seconds in the router's queue."""
        profile = decision.profile
        operation = _OPERATIONS.get(profile.endpoint, profile.endpoint.strip("/"))
        request: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": profile.requested_model or profile.model,
            "gen_ai.request.max_tokens": profile.output_bound,
            **{f"extproc.{key}": value for key, value in summary_of(decision, waited).items()},
        }
        own: Attributes = {"extproc.request_id": request_id, "extproc.pool": pool}
        _set(self._route, request | own | _address(decision.replica) | _compared(decision))
        self.ended("routed")
        name = f"{operation} {profile.model}".strip()
        self._request = self._tracer.start_span(name, self._parent)
        _set(self._request, request)

    def ended(self, result: str, error: str = "") -> None:
        """End ``route``; ``result``: as in ``extproc_requests_total``; ``error``: reason of a
        refusal, else empty."""
        self._route.set_attribute("extproc.result", result)
        if error:
            self._route.add_event("refused", {"why": error})
            _fail(self._route, error)
        self._route.end()

    def answered(self, outcome: RequestOutcome) -> None:
        if (span := self._request) is None:
            return
        answer: Attributes = {
            "http.response.status_code": outcome.status,
            "gen_ai.usage.input_tokens": outcome.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
            "gen_ai.usage.output_tokens": outcome.output_tokens,
            "gen_ai.response.time_to_first_chunk": outcome.ttft_s,
            "extproc.completion_s": outcome.completion_s,
        }
        _set(span, _address(outcome.served_by) | answer)
        if outcome.status is not None and outcome.status >= 500:
            _fail(span, str(outcome.status))
        span.end()


def _compared(decision: Decision) -> Attributes:
    """Return the terms of the predictions for the chosen replica and the second choice."""
    view, rows = decision.situation.view, {"replica": decision.choice.first}
    shown: Attributes = {"extproc.candidates": len(view)}
    if (second := decision.choice.second) is not None:
        rows["second"], shown["extproc.second"] = second, view.names[second]
    return shown | {
        f"extproc.{which}.{term}_s": getattr(decision.prediction, term).item(row)
        for which, row in rows.items()
        for term in TERMS
    }


def _address(replica: str | None) -> Attributes:
    if replica is None:
        return {}
    try:
        host, port = split_address(replica)
    except ValueError:  # a socket, or the listener of a sidecar's tunnel
        return {"server.address": replica}
    return {"server.address": host, "server.port": port}


def _set(span: "Span", attributes: Attributes) -> None:
    span.set_attributes({name: value for name, value in attributes.items() if value is not None})


def _fail(span: "Span", error: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", error)
    span.set_status(StatusCode.ERROR)
