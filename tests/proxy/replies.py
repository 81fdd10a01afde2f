"""Parts of the router's replies to Envoy."""

import json
from typing import Any

from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValueOptionHeaderAppendAction as Append,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.service.ext_proc.v3 import CommonResponse, ProcessingResponse

from extproc.proxy.messages import DESTINATION
from tests.fakes import replica

BodyMode = ProcessingModeBodySendMode
HeaderMode = ProcessingModeHeaderSendMode
MEMBERS = {replica(1), replica(2)}


def destination(reply: ProcessingResponse) -> list[str]:
    headers = reply.request_headers
    part = reply.request_body if headers is None else headers  # empty messages are falsy
    assert part is not None
    if part.response is None or part.response.header_mutation is None:
        return []
    for option in part.response.header_mutation.set_headers:
        assert option.header is not None
        if option.header.key == DESTINATION:
            assert option.append_action == Append.OVERWRITE_IF_EXISTS_OR_ADD
            return option.header.raw_value.decode().split(",")
    return []


def chosen(reply: ProcessingResponse) -> list[str]:
    if reply.dynamic_metadata is None or "envoy.lb" not in reply.dynamic_metadata.fields:
        return []
    namespace = reply.dynamic_metadata.fields["envoy.lb"].struct_value
    assert namespace is not None
    return (namespace.fields[DESTINATION].string_value or "").split(",")


def routed_to(reply: ProcessingResponse) -> list[str]:
    return destination(reply) or chosen(reply)


def chunk_of(reply: ProcessingResponse) -> tuple[bytes, bool]:
    part = reply.request_body if reply.request_body is not None else reply.response_body
    assert part is not None
    assert part.response is not None
    assert part.response.body_mutation is not None
    streamed = part.response.body_mutation.streamed_response
    assert streamed is not None
    return streamed.body, streamed.end_of_stream


def status_of(reply: ProcessingResponse) -> int:
    assert reply.immediate_response is not None
    assert reply.immediate_response.status is not None
    return int(reply.immediate_response.status.code)


def error_of(reply: ProcessingResponse) -> dict[str, Any]:
    assert reply.immediate_response is not None
    error: dict[str, Any] = json.loads(reply.immediate_response.body)["error"]
    return error


def refusal_header(reply: ProcessingResponse, name: str) -> bytes:
    assert reply.immediate_response is not None
    assert reply.immediate_response.headers is not None
    sent = [option.header for option in reply.immediate_response.headers.set_headers]
    return next(header.raw_value for header in sent if header is not None and header.key == name)


def mode_of(reply: ProcessingResponse) -> ProcessingMode:
    assert reply.mode_override is not None
    return reply.mode_override


def common(reply: ProcessingResponse) -> CommonResponse:
    parts = (reply.request_headers, reply.request_body, reply.response_body)
    part = next(part for part in parts if part is not None)
    assert part.response is not None
    return part.response


def body_of(reply: ProcessingResponse) -> bytes | None:
    """Body that replaces Envoy's; None: Envoy's body stays."""
    mutation = common(reply).body_mutation
    return None if mutation is None else mutation.body


def header_of(reply: ProcessingResponse, name: str) -> str | None:
    mutation = common(reply).header_mutation
    assert mutation is not None
    headers = [option.header for option in mutation.set_headers]
    return next(
        (header.raw_value.decode() for header in headers if header and header.key == name), None
    )
