"""Envoy's external processing messages: read from bytes, built as bytes.

The upb classes of ``proto/ext_proc.proto`` parse and build a message in a few microseconds, a
hundredth of what typed Python classes take.
"""

from collections.abc import Mapping

from extproc.server.proto.ext_proc_pb2 import (
    HeadersResponse,
    HeaderValue,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and metadata key, of the chosen endpoint: ``ip:port[,ip:port]``
(Gateway API Inference Extension, endpoint picker protocol)."""
METADATA_NAMESPACE = "envoy.lb"
_ATTRIBUTES = "envoy.filters.http.ext_proc"

NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)
"""``ProcessingMode.BodySendMode``."""
_SKIP = 2
_OVERWRITE_OR_ADD = 2

_PHASES = (
    "request_headers",
    "request_body",
    "request_trailers",
    "response_headers",
    "response_body",
    "response_trailers",
)


def _empty_reply(phase: str) -> bytes:
    reply = ProcessingResponse()
    getattr(reply, phase).SetInParent()
    return reply.SerializeToString()


_EMPTY_REPLIES = {phase: _empty_reply(phase) for phase in _PHASES}


def proceed(phase: str) -> bytes:
    """Reply to a phase: nothing to change. A phase unknown here gets an empty message."""
    return _EMPTY_REPLIES.get(phase, b"")


def _not_this_request() -> bytes:
    reply = ProcessingResponse(request_headers=HeadersResponse())
    reply.mode_override.response_header_mode = _SKIP
    return reply.SerializeToString()


LEAVE_ALONE: bytes = _not_this_request()
"""Reply to request headers: send neither this request's body nor anything of its response."""


def watch_response() -> bytes:
    """Reply to response headers: send this response's body too, as it passes."""
    reply = ProcessingResponse(response_headers=HeadersResponse())
    reply.mode_override.response_body_mode = STREAMED
    return reply.SerializeToString()


def send_to(
    phase: str, destination: str, clear_route_cache: bool = False, leave_body: bool = False
) -> bytes:
    """Reply to request headers or body: forward to ``destination`` (``ip:port[,ip:port]``).

    With ``leave_body``, to request headers alone, Envoy sends the body to the replica only.
    """
    reply = ProcessingResponse()
    if leave_body:
        reply.mode_override.request_body_mode = NONE
        reply.mode_override.SetInParent()
    common = getattr(reply, phase).response
    option = common.header_mutation.set_headers.add()
    option.header.key = DESTINATION
    option.header.raw_value = destination.encode()
    option.append_action = _OVERWRITE_OR_ADD
    common.clear_route_cache = clear_route_cache
    metadata = reply.dynamic_metadata.fields[METADATA_NAMESPACE].struct_value
    metadata.fields[DESTINATION].string_value = destination
    return reply.SerializeToString()


def pass_chunk(phase: str, body: bytes, end_of_stream: bool) -> bytes:
    """Reply to a body chunk in full duplex, where what is not sent back is lost."""
    reply = ProcessingResponse()
    chunk = getattr(reply, phase).response.body_mutation.streamed_response
    chunk.body = body
    chunk.end_of_stream = end_of_stream
    return reply.SerializeToString()


def refuse(status: int, body: bytes) -> bytes:
    """Answers the request in Envoy: ``status`` and a JSON body."""
    reply = ProcessingResponse()
    reply.immediate_response.status.code = status
    reply.immediate_response.body = body
    header = reply.immediate_response.headers.set_headers.add()
    header.header.key = "content-type"
    header.header.raw_value = b"application/json"
    header.append_action = _OVERWRITE_OR_ADD
    return reply.SerializeToString()


def headers_of(message: HttpHeaders) -> dict[str, str]:
    """Header names, which Envoy sends in lower case, and their last values."""
    return {header.key: _value(header) for header in message.headers.headers}


def _value(header: HeaderValue) -> str:
    return header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value


def attributes_of(message: ProcessingRequest) -> Mapping[str, str]:
    """The attributes Envoy was configured to send: ``upstream.address`` and the like."""
    if _ATTRIBUTES not in message.attributes:
        return {}
    fields = message.attributes[_ATTRIBUTES].fields
    return {name: value.string_value or f"{value.number_value:g}" for name, value in fields.items()}
