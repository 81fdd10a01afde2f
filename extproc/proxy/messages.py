"""Envoy's external processing messages: read from bytes, built as bytes.

The upb classes of ``proto/ext_proc.proto`` parse or build a message in a few microseconds, a
hundred times faster than typed Python classes.
"""

from collections.abc import Container, Mapping
from datetime import timedelta
from functools import cache, lru_cache
from typing import NamedTuple

from extproc.proxy.proto.ext_proc_pb2 import (
    HeaderMutation,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and metadata key, for the router's choice of replicas: ``ip:port[,ip:port]``
(Gateway API Inference Extension, endpoint picker protocol)."""
SERVED = "x-gateway-destination-endpoint-served"
"""Metadata key of the endpoint that sent the response; gateways set it with response headers."""
SUBSET = "x-gateway-destination-endpoint-subset"
"""Metadata key under which a gateway lists the endpoints that the router may choose."""
RESPONSE_SKIPPED = "x-extproc-response-skipped"
"""Header that Envoy adds to requests whose responses it does not forward to the router
(``envoy/envoy.yaml``)."""
PRIORITY = "x-vllm-priority"  # header that vLLM prefers to the body's ``priority``
RANK = "x-data-parallel-rank"  # header that selects vLLM's data-parallel engine
ATTEMPTS = "upstream.request_attempt_count"  # attribute of a response
METADATA_NAMESPACE = "envoy.lb"
DECISION_NAMESPACE = "extproc"  # metadata with the decision, for access logs
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_CONTROL_HEADERS = (DESTINATION, SUBSET, SERVED)
_ATTRIBUTES = "envoy.filters.http.ext_proc"
_CONNECTION_FAILED = 1 << 5
"""``UF`` among Envoy's response flags: the last attempt got no connection, so no byte was sent."""
_OWN_ATTRIBUTES = {
    ":path": "request.path",
    ":method": "request.method",
    "x-request-id": "request.id",
}

NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)
"""Values of ``ProcessingMode.BodySendMode``."""
_SEND, _SKIP = 1, 2
"""Values of ``ProcessingMode.HeaderSendMode``, for headers and trailers. The router asks for the
response's trailers, because otherwise Envoy would close the stream before the response ends."""
_OVERWRITE_OR_ADD = 2
_CONTINUE_AND_REPLACE = 1  # ``CommonResponse.ResponseStatus``


LEAVE_ALONE = ProcessingResponse(
    request_headers={"response": {"header_mutation": {"remove_headers": _CONTROL_HEADERS}}},
    mode_override={"response_header_mode": _SKIP},
).SerializeToString()
"""Reply to request headers that asks Envoy for neither the body nor the response, and removes the
headers by which a client could name a destination."""
RESPONSE_ONLY = ProcessingResponse(
    request_headers={}, mode_override={"response_trailer_mode": _SEND}
).SerializeToString()
"""Reply to request headers that asks Envoy for the response, but not for the body."""
BODY_ONLY = ProcessingResponse(
    request_headers={},
    mode_override={
        "request_body_mode": BUFFERED,
        "response_header_mode": _SKIP,
        "response_trailer_mode": _SEND,
    },
).SerializeToString()
"""Reply to request headers that asks Envoy for the body, but not for the response."""
WATCH_RESPONSE = ProcessingResponse(
    response_headers={},
    mode_override={"response_body_mode": STREAMED, "response_trailer_mode": _SEND},
).SerializeToString()
"""Reply to response headers that asks Envoy to send the body also to the router, while the body
streams to the client."""


@cache
def proceed(phase: str) -> bytes:
    """Reply that changes nothing. ``phase`` is empty for a message that the router does not know;
    the reply is then empty."""
    return ProcessingResponse(**({phase: {}} if phase else {})).SerializeToString()


@cache
def wait(seconds: float) -> bytes:
    """Message that asks Envoy to wait ``seconds`` for the reply; Envoy waits at most its
    ``max_message_timeout``."""
    timeout = timedelta(seconds=seconds)
    return ProcessingResponse(override_message_timeout=timeout).SerializeToString()


@lru_cache(maxsize=4096)  # a reply takes 5 µs to build; there may be many pairs of replicas
def send_to(
    phase: str, destination: str, leave_body: bool = False, priority: int | None = None
) -> bytes:
    """Reply that makes Envoy send the request to ``destination`` (``ip:port[,ip:port]``).

    ``leave_body``, in a reply to headers: Envoy sends the body to the replica, and not to the
    router. ``priority`` replaces the client's priority header.
    """
    alone = {"request_body_mode": NONE, "response_trailer_mode": _SEND}
    reply = ProcessingResponse(mode_override=alone if leave_body else None)
    common = getattr(reply, phase).response
    _set_header(common.header_mutation, DESTINATION, destination.encode())
    common.header_mutation.remove_headers.extend((SUBSET, SERVED, RANK))
    if priority is not None:
        _set_header(common.header_mutation, PRIORITY, b"%d" % priority)
    metadata = reply.dynamic_metadata.fields[METADATA_NAMESPACE].struct_value
    metadata.fields[DESTINATION].string_value = destination
    return reply.SerializeToString()


def _set_header(mutation: HeaderMutation, name: str, value: bytes) -> None:
    option = mutation.set_headers.add()
    option.header.key, option.header.raw_value = name, value
    option.append_action = _OVERWRITE_OR_ADD


def with_metadata(reply: bytes, metadata: Mapping[str, str | float]) -> bytes:
    """Adds metadata to a reply, in a namespace that Envoy's clusters do not read."""
    changed = ProcessingResponse.FromString(reply)
    changed.dynamic_metadata.fields[DECISION_NAMESPACE].struct_value.update(metadata)
    return changed.SerializeToString()


def with_body(reply: bytes, body: bytes) -> bytes:
    """Adds a new body to the reply to a request's body."""
    changed = ProcessingResponse.FromString(reply)
    common = changed.request_body.response
    common.body_mutation.body = body
    _set_header(common.header_mutation, "content-length", b"%d" % len(body))
    return changed.SerializeToString()


def with_whole_request(reply: bytes, body: bytes) -> bytes:
    """Adds the whole body to the reply to a request's headers. Envoy then sends no more of the
    request to the router, and forwards the trailers."""
    changed = ProcessingResponse.FromString(reply)
    common = changed.request_headers.response
    common.status = _CONTINUE_AND_REPLACE
    common.body_mutation.body = body
    return changed.SerializeToString()


def pass_chunk(phase: str, body: bytes, end_of_stream: bool) -> bytes:
    """Reply to a body chunk in full duplex: Envoy forwards only bytes that the router returns."""
    reply = ProcessingResponse()
    chunk = getattr(reply, phase).response.body_mutation.streamed_response
    chunk.body = body
    chunk.end_of_stream = end_of_stream
    return reply.SerializeToString()


def answer(status: int, body: bytes, retry_after: int = 0) -> bytes:
    """Answer to the client, with a JSON body; ``retry_after``: seconds, or 0 for no header."""
    reply = ProcessingResponse(immediate_response={"status": {"code": status}, "body": body})
    _set_header(reply.immediate_response.headers, "content-type", b"application/json")
    if retry_after:
        _set_header(reply.immediate_response.headers, "retry-after", b"%d" % retry_after)
    return reply.SerializeToString()


def headers_of(message: HttpHeaders, names: Container[str]) -> dict[str, str]:
    """Values of the named headers; if a header repeats, its last value. Names are lower-case."""
    return {
        name: header.raw_value.decode("utf-8", "replace") or header.value
        for header in message.headers.headers
        if (name := header.key) in names
    }


def status_of(headers: Mapping[str, str]) -> int | None:
    """Status of a response, or None if the headers have none."""
    status = headers.get(":status", "")
    return int(status) if status.isdecimal() else None


def attributes_of(message: ProcessingRequest, names: frozenset[str]) -> dict[str, str]:
    """Values of the named headers that Envoy sends as ``request_attributes`` with the body."""
    # A missing key of a protobuf map reads as an empty message.
    fields, named = message.attributes[_ATTRIBUTES].fields, _by_expression(names)
    return {
        named[key]: fields[key].string_value.decode("utf-8", "replace")
        for key in fields
        if key in named
    }


@cache
def _by_expression(names: frozenset[str]) -> dict[str, str]:
    return {expression_of(name): name for name in names}


def expression_of(header: str) -> str:
    """Name of Envoy's attribute for a request header."""
    return _OWN_ATTRIBUTES.get(header, f"request.headers['{header}']")


def subset_of(message: ProcessingRequest) -> frozenset[str] | None:
    """Endpoints, ``ip:port``, among which the gateway lets the router choose; None: all
    endpoints."""
    namespaces = message.metadata_context.filter_metadata
    if _SUBSET_NAMESPACE not in namespaces or SUBSET not in namespaces[_SUBSET_NAMESPACE].fields:
        return None
    hint = namespaces[_SUBSET_NAMESPACE].fields[SUBSET]
    listed = [value.string_value for value in hint.list_value.values]
    return frozenset(name.strip() for name in listed or hint.string_value.split(",") if name)


class Upstream(NamedTuple):
    """Endpoint that answered a request, and how Envoy reached it."""

    address: str  # endpoint that sent the response, ``ip:port``; empty: unknown
    attempts: int  # requests that Envoy sent, 1 without a retry; 0: unknown
    destination: str  # choice in Envoy's metadata; empty: unknown, or Envoy has no choice
    is_unsent: bool  # Envoy answered: its last attempt to reach a replica got no connection


def upstream_of(message: ProcessingRequest) -> Upstream:
    """Reads the :class:`Upstream` of a request from the message with the response's headers."""
    # A missing key of a protobuf map reads as an empty message.
    fields = message.attributes[_ATTRIBUTES].fields
    metadata = message.metadata_context.filter_metadata[METADATA_NAMESPACE].fields
    address = fields["upstream.address"].string_value.decode() or metadata[SERVED].string_value
    attempts = int(fields[ATTEMPTS].number_value)
    flags = int(fields["response.flags"].number_value)
    destination = metadata[DESTINATION].string_value
    return Upstream(address, attempts, destination, bool(flags & _CONNECTION_FAILED))
