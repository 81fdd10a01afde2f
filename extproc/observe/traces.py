"""OpenTelemetry spans of a request: its decision, and then the request on its replica."""

from collections.abc import Iterable
from os import getpid
from socket import gethostname
from threading import Thread
from typing import TYPE_CHECKING

from extproc.ground.address import split_address
from extproc.observe.decision import Outcome
from extproc.observe.decision_log import TERMS, summary_of
from extproc.request.endpoint import Endpoint
from extproc.route.router import Decision

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

Attributes = dict[str, str | int | float | None]

_PATH = "/v1/traces"  # of OTLP over HTTP
_LEFT_OUT = "-00"  # the flags of a `traceparent` that is not sampled, at its end
_FLUSH_S = 2.0  # for the last spans, when the router stops: a collector may be gone
_OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.MESSAGES: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
}
"""As the semantic conventions of OpenTelemetry (``gen_ai.operation.name``) have them."""


class Traces:
    """Sends spans to a collector, from a thread of the SDK's own.

    What is sampled follows the caller, as the SDK does by default. Its environment variables count
    (``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS`` and the like).
    """

    def __init__(self, endpoint: str) -> None:
        """Takes the base URL of a collector (OTLP over HTTP).

        Raises:
            ValueError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            from extproc.observe.span_exporter import SpanExporter
        except ImportError:
            raise ValueError(
                "traces.endpoint is set, but OpenTelemetry is not installed: "
                "pip install 'extproc[traces]'"
            ) from None
        own = {"service.name": "extproc", "service.instance.id": f"{gethostname()}/{getpid()}"}
        resource = Resource(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = SpanExporter(endpoint.rstrip("/") + _PATH)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("extproc")
        self._parent = TraceContextTextMapPropagator().extract

    def begin(self, metadata: Iterable[tuple[str, str | bytes]]) -> "Trace | None":
        """The trace of a request that came now; None where it is not sampled.

        ``metadata``: of its gRPC stream, in which Envoy names its span: no client can.
        """
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        if carrier.get("traceparent", "").endswith(_LEFT_OUT):
            return None  # most, as a rule: in a tenth of the time
        parent = self._parent(carrier)
        span = self._tracer.start_span("route", parent)
        return Trace(self._tracer, parent, span) if span.is_recording() else None

    def close(self) -> None:
        """Sends what is left, if that takes no longer than a moment."""
        flush = Thread(target=self._provider.shutdown, daemon=True)
        flush.start()
        flush.join(_FLUSH_S)
        if flush.is_alive():
            # It tries no more, and its thread ends.
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # in the SDK
            flush.join(_FLUSH_S)


class Trace:
    """The two spans of a request, one after the other.

    ``route`` lasts until it is sent, or refused; the other until its response has ended. What makes
    no replica compute has none: a span that does not end is not sent.
    """

    def __init__(self, tracer: "Tracer", parent: "Context", route: "Span") -> None:
        self._tracer = tracer
        self._parent = parent
        self._route = route
        self._request: Span | None = None

    def waits(self, why: str) -> None:
        """It waits at the router."""
        self._route.add_event("held", {"why": why})

    def sent(self, decision: Decision, request_id: str, pool: str, waited: float) -> None:
        """It goes to a replica now, ``waited`` seconds after it came."""
        profile = decision.profile
        asked: Attributes = {
            "gen_ai.operation.name": _OPERATIONS.get(profile.endpoint, profile.endpoint.strip("/")),
            "gen_ai.request.model": profile.asked or profile.model,
            "gen_ai.request.max_tokens": profile.output_bound,
        }
        asked |= {f"extproc.{key}": value for key, value in summary_of(decision, waited).items()}
        own: Attributes = {"extproc.request_id": request_id, "extproc.pool": pool}
        _set(self._route, asked | own | _address(decision.replica) | _compared(decision))
        self.ended("routed")
        name = f"{asked['gen_ai.operation.name']} {profile.model}"
        self._request = self._tracer.start_span(name.strip(), self._parent)
        _set(self._request, asked)

    def ended(self, result: str, error: str = "") -> None:
        """The decision is over, as ``extproc_requests_total`` calls it; ``error``: why it is
        refused."""
        self._route.set_attribute("extproc.result", result)
        if error:
            self._route.add_event("refused", {"why": error})
            _fail(self._route, error)
        self._route.end()

    def answered(self, outcome: Outcome) -> None:
        """Its response has ended, or was given up."""
        if (span := self._request) is None:
            return
        _set(
            span,
            _address(outcome.served_by)
            | {
                "http.response.status_code": outcome.status,
                "gen_ai.usage.input_tokens": outcome.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
                "gen_ai.usage.output_tokens": outcome.output_tokens,
                "gen_ai.response.time_to_first_chunk": outcome.ttft_s,
                "extproc.completion_s": outcome.completion_s,
            },
        )
        if outcome.status is not None and outcome.status >= 500:
            _fail(span, str(outcome.status))
        span.end()


def _compared(decision: Decision) -> Attributes:
    """The terms of the replica chosen and of the runner-up."""
    choice, view = decision.choice, decision.situation.view
    second = {} if choice.second is None else {"second": choice.second}
    return {
        "extproc.candidates": len(view),
        **{f"extproc.{which}": view.names[row] for which, row in second.items()},
        **{
            f"extproc.{which}.{term}_s": getattr(decision.prediction, term).item(row)
            for which, row in ({"replica": choice.first} | second).items()
            for term in TERMS
        },
    }


def _address(replica: str | None) -> Attributes:
    if replica is None:
        return {}
    host, port = split_address(replica)
    return {"server.address": host, "server.port": port}


def _set(span: "Span", attributes: Attributes) -> None:
    """But those that are not known."""
    span.set_attributes({name: value for name, value in attributes.items() if value is not None})


def _fail(span: "Span", error: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", error)
    span.set_status(StatusCode.ERROR)
