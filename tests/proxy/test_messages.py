"""Fields of Envoy's messages that other tests do not send."""

from typing import Any

from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.service.ext_proc import v3 as envoy
from envoy_data_plane.google.protobuf import ListValue, Struct, Value

from extproc.proxy import messages
from extproc.proxy.proto import ext_proc_pb2
from tests.proxy.envoy_side import attributes_of


def test_header_values_may_be_text_or_any_bytes() -> None:
    headers = [
        HeaderValue(key=":path", raw_value=b"/v1/models"),
        HeaderValue(key="x-old", value="plain"),
        HeaderValue(key="x-odd", raw_value=b"\xff"),
    ]
    message = received(request_headers=envoy.HttpHeaders(headers=HeaderMap(headers=headers)))
    found = messages.headers_of(message.request_headers, {"x-old", "x-odd", "x-none"})
    assert found == {"x-old": "plain", "x-odd": "\ufffd"}


def received(**fields: Any) -> ext_proc_pb2.ProcessingRequest:
    return ext_proc_pb2.ProcessingRequest.FromString(bytes(envoy.ProcessingRequest(**fields)))


def metadata_of(namespace: str, **fields: Value) -> Metadata:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return Metadata(filter_metadata={namespace: Struct(fields=named)})


def test_serving_replica_is_read_from_attribute_or_metadata() -> None:
    attributes = attributes_of({"upstream.address": "10.0.0.2:8000"})
    served = Value(string_value="10.0.0.3:8000")
    metadata = metadata_of("envoy.lb", x_gateway_destination_endpoint_served=served)

    def address(**message: Any) -> str:
        return messages.upstream_of(received(**message)).address

    assert address(attributes=attributes) == "10.0.0.2:8000"
    assert address(metadata_context=metadata) == "10.0.0.3:8000"
    assert address(attributes=attributes, metadata_context=metadata) == "10.0.0.2:8000"
    assert address() == ""


def test_subset_is_read_as_list_or_text() -> None:
    def subset(value: Value) -> frozenset[str] | None:
        metadata = metadata_of("envoy.lb.subset_hint", x_gateway_destination_endpoint_subset=value)
        return messages.subset_of(received(metadata_context=metadata))

    names = [Value(string_value="10.0.0.1:8000"), Value(string_value="10.0.0.2:8000")]
    both = frozenset({"10.0.0.1:8000", "10.0.0.2:8000"})
    assert subset(Value(list_value=ListValue(values=names))) == both
    assert subset(Value(string_value="10.0.0.1:8000, 10.0.0.2:8000")) == both
    assert subset(Value(list_value=ListValue(values=[]))) == frozenset()
    assert messages.subset_of(received()) is None
    without = metadata_of("envoy.lb.subset_hint")
    assert messages.subset_of(received(metadata_context=without)) is None
