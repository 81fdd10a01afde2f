"""Spans to their collector; of one that is gone the log tells once, and once when it is back."""

from collections.abc import Sequence
from logging import CRITICAL, ERROR, getLogger

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

logger = getLogger(__name__)
_SDK = getLogger("opentelemetry.exporter")
"""A try to reach a collector is a warning, a batch that fails an error with the reason."""


class SpanExporter(OTLPSpanExporter):
    """The SDK's, whose line about a failure is not repeated until a batch arrives."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._fails = False
        _SDK.setLevel(ERROR)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch, and tries again for seconds."""
        result = super().export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if self._fails and not failed:
            logger.warning("spans reach their collector again")
        self._fails = failed
        _SDK.setLevel(CRITICAL if failed else ERROR)
        return result
