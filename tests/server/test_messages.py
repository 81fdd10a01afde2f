"""Every message, checked against an independent codec: envoy-data-plane."""

from typing import Any

import betterproto2
import pytest
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as BodyMode,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeHeaderSendMode as HeaderMode,
)
from envoy_data_plane.envoy.service.ext_proc import v3 as envoy
from envoy_data_plane.google.protobuf import ListValue, Struct, Value

from extproc.server import messages
from extproc.server.proto import ext_proc_pb2


def parsed(reply: bytes) -> envoy.ProcessingResponse:
    return envoy.ProcessingResponse.parse(reply)


def which(message: betterproto2.Message, group: str) -> tuple[str, Any]:
    name, value = betterproto2.which_one_of(message, group)
    return name, value


@pytest.mark.parametrize(
    "phase",
    [
        "request_headers",
        "request_body",
        "request_trailers",
        "response_headers",
        "response_body",
        "response_trailers",
    ],
)
def test_proceed_answers_the_phase_and_changes_nothing(phase: str) -> None:
    reply = parsed(messages.proceed(phase))
    name, value = which(reply, "response")
    assert name == phase
    assert bytes(value) == b""
    assert reply.mode_override is None


def test_an_unknown_phase_gets_an_empty_message() -> None:
    assert which(parsed(messages.proceed("something new")), "response") == ("", None)


def test_leave_alone_asks_for_nothing_more() -> None:
    reply = parsed(messages.LEAVE_ALONE)
    assert which(reply, "response")[0] == "request_headers"
    assert reply.mode_override is not None
    assert reply.mode_override.request_body_mode == BodyMode.NONE
    assert reply.mode_override.response_header_mode == HeaderMode.SKIP


def test_watch_response_asks_for_the_chunks() -> None:
    reply = parsed(messages.watch_response())
    assert which(reply, "response")[0] == "response_headers"
    assert reply.mode_override is not None
    assert reply.mode_override.response_body_mode == BodyMode.STREAMED


@pytest.mark.parametrize("phase", ["request_headers", "request_body"])
@pytest.mark.parametrize("clear", [False, True])
def test_send_to_sets_header_and_metadata(phase: str, clear: bool) -> None:
    reply = parsed(messages.send_to(phase, "10.0.0.1:8000,10.0.0.2:8000", clear))
    name, value = which(reply, "response")
    assert name == phase
    common = value.response
    assert common.clear_route_cache is clear
    (option,) = common.header_mutation.set_headers
    assert option.header.key == "x-gateway-destination-endpoint"
    assert option.header.raw_value == b"10.0.0.1:8000,10.0.0.2:8000"
    assert option.append_action == 2
    assert reply.dynamic_metadata is not None
    balancer = reply.dynamic_metadata.fields["envoy.lb"].struct_value
    assert balancer is not None
    destination = balancer.fields["x-gateway-destination-endpoint"].string_value
    assert destination == "10.0.0.1:8000,10.0.0.2:8000"


def test_a_body_may_be_left_with_envoy() -> None:
    reply = parsed(messages.send_to("request_headers", "10.0.0.1:8000", leave_body=True))
    assert reply.mode_override is not None
    assert reply.mode_override.request_body_mode == BodyMode.NONE
    assert reply.mode_override.response_header_mode == HeaderMode.DEFAULT


def test_pass_chunk_gives_the_bytes_back() -> None:
    reply = parsed(messages.pass_chunk("request_body", b"\x00chunk\xff", True))
    _, value = which(reply, "response")
    chunk = value.response.body_mutation.streamed_response
    assert (chunk.body, chunk.end_of_stream) == (b"\x00chunk\xff", True)


def test_an_answer_in_envoy() -> None:
    reply = parsed(messages.answer(400, b'{"error": {}}'))
    _, value = which(reply, "response")
    assert value.status.code == 400
    assert value.body == b'{"error": {}}'
    assert value.headers.set_headers[0].header.raw_value == b"application/json"


def test_request_headers_are_read() -> None:
    theirs = envoy.ProcessingRequest(
        request_headers=envoy.HttpHeaders(
            headers=HeaderMap(
                headers=[
                    HeaderValue(key=":path", raw_value=b"/v1/models"),
                    HeaderValue(key="x-old", value="plain"),
                    HeaderValue(key="x-odd", raw_value=b"\xff"),
                ]
            ),
            end_of_stream=True,
        ),
        protocol_config=envoy.ProtocolConfiguration(
            request_body_mode=BodyMode.FULL_DUPLEX_STREAMED,
            response_body_mode=BodyMode.STREAMED,
            send_body_without_waiting_for_header_response=True,
        ),
        metadata_context=Metadata(
            filter_metadata={"envoy.lb": Struct(fields={"a": Value(string_value="b")})}
        ),
    )
    ours = ext_proc_pb2.ProcessingRequest.FromString(bytes(theirs))
    assert ours.WhichOneof("request") == "request_headers"
    assert ours.request_headers.end_of_stream
    headers = messages.headers_of(ours.request_headers, {"x-old", "x-odd", "x-none"})
    assert headers == {"x-old": "plain", "x-odd": "\ufffd"}
    assert ours.protocol_config.request_body_mode == messages.FULL_DUPLEX_STREAMED
    assert ours.protocol_config.response_body_mode == messages.STREAMED
    assert ours.protocol_config.send_body_without_waiting_for_header_response
    assert ours.metadata_context.filter_metadata["envoy.lb"].fields["a"].string_value == "b"


@pytest.mark.parametrize("phase", ["request_body", "response_body"])
def test_bodies_are_read(phase: str) -> None:
    body = envoy.HttpBody(body=b"\x00{}", end_of_stream=True)
    theirs = envoy.ProcessingRequest(**{phase: body})  # type: ignore[arg-type]
    ours = ext_proc_pb2.ProcessingRequest.FromString(bytes(theirs))
    assert ours.WhichOneof("request") == phase
    assert getattr(ours, phase).body == b"\x00{}"
    assert getattr(ours, phase).end_of_stream


@pytest.mark.parametrize("phase", ["request_trailers", "response_trailers"])
def test_trailers_are_read(phase: str) -> None:
    trailers = envoy.HttpTrailers(trailers=HeaderMap(headers=[HeaderValue(key="t", value="v")]))
    theirs = envoy.ProcessingRequest(**{phase: trailers})  # type: ignore[arg-type]
    ours = ext_proc_pb2.ProcessingRequest.FromString(bytes(theirs))
    assert ours.WhichOneof("request") == phase
    assert getattr(ours, phase).trailers.headers[0].key == "t"


def received(**fields: Any) -> ext_proc_pb2.ProcessingRequest:
    """What Envoy sends, read with our codec."""
    return ext_proc_pb2.ProcessingRequest.FromString(bytes(envoy.ProcessingRequest(**fields)))


def told(namespace: str, **fields: Value) -> Metadata:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return Metadata(filter_metadata={namespace: Struct(fields=named)})


def test_who_served_is_read_from_attribute_or_metadata() -> None:
    attribute = {"upstream.address": Value(string_value="10.0.0.2:8000")}
    metadata = told(
        "envoy.lb", x_gateway_destination_endpoint_served=Value(string_value="10.0.0.3:8000")
    )
    attributes = {"envoy.filters.http.ext_proc": Struct(fields=attribute)}
    assert messages.served_by(received(attributes=attributes)) == "10.0.0.2:8000"
    assert messages.served_by(received(metadata_context=metadata)) == "10.0.0.3:8000"
    both = received(attributes=attributes, metadata_context=metadata)
    assert messages.served_by(both) == "10.0.0.2:8000"
    assert messages.served_by(received()) == ""


def test_a_subset_is_read_as_list_or_text() -> None:
    def subset(value: Value) -> frozenset[str] | None:
        metadata = told("envoy.lb.subset_hint", x_gateway_destination_endpoint_subset=value)
        return messages.subset_of(received(metadata_context=metadata))

    names = [Value(string_value="10.0.0.1:8000"), Value(string_value="10.0.0.2:8000")]
    both = frozenset({"10.0.0.1:8000", "10.0.0.2:8000"})
    assert subset(Value(list_value=ListValue(values=names))) == both
    assert subset(Value(string_value="10.0.0.1:8000, 10.0.0.2:8000")) == both
    assert subset(Value(list_value=ListValue(values=[]))) == frozenset()
    assert messages.subset_of(received()) is None
    assert messages.subset_of(received(metadata_context=told("envoy.lb.subset_hint"))) is None


def test_one_reply_does_not_change_another() -> None:
    first = messages.send_to("request_body", "10.0.0.1:8000,10.0.0.2:8000")
    messages.send_to("request_body", "10.0.0.3:8000")
    messages.send_to("request_headers", "10.0.0.4:8000", leave_body=True)
    assert messages.send_to("request_body", "10.0.0.1:8000,10.0.0.2:8000") == first
