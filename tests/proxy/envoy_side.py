"""Envoy's end of the protocol, with messages of envoy-data-plane, in memory or over gRPC."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, cast

import grpc
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy_data_plane.google.protobuf import ListValue, Struct, Value

from extproc.proxy.messages import ATTEMPTS, DESTINATION, SUBSET
from extproc.proxy.service import SERVICE, GrpcServer
from extproc.proxy.services import Services
from tests.proxy.replies import BodyMode, body_of, chunk_of, destination

DUPLEX: dict[str, Any] = {
    "body_mode": BodyMode.FULL_DUPLEX_STREAMED,
    "response_mode": BodyMode.FULL_DUPLEX_STREAMED,
}
JsonOrBytes = dict[str, Any] | bytes
PROTOCOLS = "headers first", "body first", "before trailers", "full duplex"
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hello " * 50}]}
STREAMED = CHAT | {"stream": True}
EVENTS = "text/event-stream"
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 32},
}
LAST = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": USAGE}).encode()
NAMED = {"x-request-id": "one"}
REQUEST_TRAILERS = ProcessingRequest(request_trailers=HttpTrailers(trailers=HeaderMap()))
RESPONSE_TRAILERS = ProcessingRequest(response_trailers=HttpTrailers(trailers=HeaderMap()))


def request_headers(
    path: str = "/v1/chat/completions",
    method: str = "POST",
    end_of_stream: bool = False,
    body_mode: BodyMode = BodyMode.BUFFERED,
    response_mode: BodyMode = BodyMode.NONE,
    headers: Mapping[str, str] = MappingProxyType({}),
    subset: list[str] | None = None,
) -> ProcessingRequest:
    hint = None if subset is None else {"envoy.lb.subset_hint": _listed(SUBSET, subset)}
    values = {":path": path, ":method": method, **headers}
    return ProcessingRequest(
        request_headers=headers_message(values, end_of_stream),
        protocol_config=ProtocolConfiguration(
            request_body_mode=body_mode, response_body_mode=response_mode
        ),
        metadata_context=None if hint is None else Metadata(filter_metadata=hint),
    )


def body_first(
    body: JsonOrBytes,
    path: str = "/v1/chat/completions",
    headers: Mapping[str, str] | None = None,
    end_of_stream: bool = True,
) -> ProcessingRequest:
    """A body as the first message, with the headers as attributes."""
    values = {f"request.headers['{name}']": value for name, value in (headers or {}).items()}
    if request_id := (headers or {}).get("x-request-id"):
        values["request.id"] = request_id
    return ProcessingRequest(
        request_body=HttpBody(body=as_bytes(body), end_of_stream=end_of_stream),
        attributes=attributes_of(values | {"request.path": path}),
        protocol_config=ProtocolConfiguration(request_body_mode=BodyMode.BUFFERED),
    )


def request_body(body: JsonOrBytes, end_of_stream: bool = True) -> ProcessingRequest:
    return ProcessingRequest(
        request_body=HttpBody(body=as_bytes(body), end_of_stream=end_of_stream)
    )


def response_headers(
    status: int | str = 200,
    upstream: str = "",
    content_type: str = "application/json",
    end_of_stream: bool = False,
    flags: int = 0,
    attempts: int = 0,
    held: str = "",
) -> ProcessingRequest:
    """``flags``: Envoy's response flags; ``attempts``: times that Envoy sent the request; ``held``:
    choice in Envoy's metadata."""
    values = {":status": str(status), "content-type": content_type}
    attributes = {"upstream.address": upstream} if upstream else {}
    return ProcessingRequest(
        response_headers=headers_message(values, end_of_stream),
        attributes=attributes_of(attributes, {"response.flags": flags, ATTEMPTS: attempts}),
        metadata_context=Metadata(
            filter_metadata={"envoy.lb": Struct(fields={DESTINATION: Value(string_value=held)})}
        ),
    )


def response_body(body: JsonOrBytes, end_of_stream: bool = True) -> ProcessingRequest:
    return ProcessingRequest(
        response_body=HttpBody(body=as_bytes(body), end_of_stream=end_of_stream)
    )


class Stream:
    """An HTTP request, as Envoy sends it to the router."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, message: ProcessingRequest) -> ProcessingResponse:
        return await self.send_bytes(bytes(message))

    async def send_bytes(self, message: bytes) -> ProcessingResponse:
        await self._call.write(message)
        return await self.read()

    async def write(self, request: ProcessingRequest) -> None:
        await self._call.write(bytes(request))

    async def read(self) -> ProcessingResponse:
        reply = await self._call.read()
        assert reply is not grpc.aio.EOF
        return ProcessingResponse.parse(reply)

    async def ask(
        self, body: JsonOrBytes = CHAT, *headers: Any, **named: Any
    ) -> ProcessingResponse:
        """Sends headers and a whole body; returns the reply to the body."""
        await self.request_headers(*headers, **named)
        return await self.request_body(body)

    async def answer(self, *chunks: JsonOrBytes, **headers: Any) -> ProcessingResponse:
        """Sends a whole response; returns the reply to its headers."""
        reply = await self.response_headers(**headers)
        for left, chunk in zip(reversed(range(len(chunks))), chunks, strict=True):
            await self.response_body(chunk, end_of_stream=not left)
        await self.end()
        return reply

    async def begin(self, body: JsonOrBytes = STREAMED, upstream: str = "") -> str:
        """Sends a request and the headers of its streamed response, by default of the first choice;
        returns the first choice."""
        first = destination(await self.ask(body, headers=NAMED))[0]
        await self.response_headers(upstream=upstream or first, content_type=EVENTS)
        return first

    async def request_headers(self, *arguments: Any, **named: Any) -> ProcessingResponse:
        return await self.send(request_headers(*arguments, **named))

    async def write_headers(self, *arguments: Any, **named: Any) -> None:
        """Sends the request's headers in full duplex, where the reply waits for the body."""
        await self.write(request_headers(*arguments, **(DUPLEX | named)))

    async def body_first(self, *arguments: Any, **named: Any) -> ProcessingResponse:
        return await self.send(body_first(*arguments, **named))

    async def write_body(self, *arguments: Any, **named: Any) -> None:
        await self.write(request_body(*arguments, **named))

    async def request_body(self, *arguments: Any, **named: Any) -> ProcessingResponse:
        return await self.send(request_body(*arguments, **named))

    async def response_headers(self, *arguments: Any, **named: Any) -> ProcessingResponse:
        return await self.send(response_headers(*arguments, **named))

    async def request_chunks(self) -> bytes:
        """Reads the body that the router returns in full duplex."""
        body, ended = b"", False
        while not ended:
            chunk, ended = chunk_of(await self.read())
            body += chunk
        return body

    async def response_body(self, *arguments: Any, **named: Any) -> ProcessingResponse:
        return await self.send(response_body(*arguments, **named))

    async def request_trailers(self) -> ProcessingResponse:
        return await self.send(REQUEST_TRAILERS)

    async def end(self) -> None:
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF

    def reset(self) -> None:
        self._call.cancel()


class LocalCall:
    """A stream without gRPC: Envoy's end, and the router's ``context``."""

    def __init__(self, server: GrpcServer, metadata: Sequence[tuple[str, str]]) -> None:
        self.context = Context(metadata)
        self.error: BaseException | None = None
        context = cast("grpc.aio.ServicerContext", self.context)
        self.serving = asyncio.create_task(server._process(None, context))
        self.serving.add_done_callback(self._ended)

    def _ended(self, serving: asyncio.Task[None]) -> None:
        self.error = None if serving.cancelled() else serving.exception()
        self.context.replies.put_nowait(self.error or grpc.aio.EOF)

    async def write(self, message: bytes) -> None:
        self.context.messages.put_nowait(message)

    async def read(self) -> Any:
        reply = await self.context.replies.get()
        if isinstance(reply, BaseException):
            raise reply
        return reply

    async def done_writing(self) -> None:
        self.context.messages.put_nowait(grpc.aio.EOF)

    def cancel(self) -> None:
        self.serving.cancel()
        self.context.reset()


class Context:
    """The ``ServicerContext`` of a stream in memory."""

    def __init__(self, metadata: Sequence[tuple[str, str]]) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: asyncio.Queue[Any] = asyncio.Queue()
        self.reads_replies = asyncio.Event()
        self.reads_replies.set()
        self._metadata = metadata
        self._is_reset = False

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def peer(self) -> str:
        return "in memory"

    async def read(self) -> Any:
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def write(self, reply: bytes) -> None:
        await self.reads_replies.wait()
        if self._is_reset:
            raise grpc.aio.UsageError("reset")
        self.replies.put_nowait(reply)

    def reset(self) -> None:
        self._is_reset = True
        self.reads_replies.set()
        self.messages.put_nowait(grpc.aio.UsageError("reset"))


class Local:
    """A router in this process, without a port, in place of a channel to a router."""

    def __init__(self, services: Services) -> None:
        self.server = GrpcServer(services)

    def stream_stream(self, _: str) -> Any:
        return self.begin

    def begin(self, metadata: Sequence[tuple[str, str]] = ()) -> LocalCall:
        return LocalCall(self.server, metadata)


class EnvoySide:
    """Opens streams to a router."""

    def __init__(self, channel: grpc.aio.Channel | Local) -> None:
        self._process = channel.stream_stream(f"/{SERVICE}/Process")

    @asynccontextmanager
    async def stream(self, traceparent: str = "") -> AsyncIterator[Stream]:
        metadata = [("traceparent", traceparent)] if traceparent else []
        call = self._process(metadata=metadata)
        try:
            yield Stream(call)
        finally:
            call.cancel()

    async def route(
        self,
        protocol: str,
        body: JsonOrBytes = CHAT,
        path: str = "/v1/chat/completions",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[ProcessingResponse, bytes | None]:
        """Sends a request in one of ``PROTOCOLS``; returns the reply with the decision, and the
        body that the replica gets, or None if the body is unchanged."""
        data, values = as_bytes(body), dict(headers)
        async with self.stream() as stream:
            if protocol == "full duplex":
                await stream.write_headers(path, headers=values)
                await stream.write_body(data[:9], end_of_stream=False)
                reply = await stream.request_body(data[9:])
                changed = await stream.request_chunks() if reply.request_headers else None
            else:
                if protocol == "headers first":
                    values["content-length"] = str(len(data))
                    reply = await stream.ask(data, path, headers=values)
                else:
                    reply = await stream.body_first(data, path, values, protocol == "body first")
                changed = None if reply.immediate_response else body_of(reply)
                if protocol == "before trailers" and reply.request_body:
                    assert (await stream.request_trailers()).request_trailers is not None
            await stream.end()
        return reply, None if changed == data else changed

    async def ask(
        self, body: JsonOrBytes = CHAT, *headers: Any, **named: Any
    ) -> ProcessingResponse:
        """Sends a request whose client then hangs up; returns the reply to the body."""
        async with self.stream() as stream:
            reply = await stream.ask(body, *headers, **named)
            await stream.end()
        return reply

    async def ask_body_first(
        self, body: JsonOrBytes = CHAT, *headers: Any, traceparent: str = "", **named: Any
    ) -> ProcessingResponse:
        async with self.stream(traceparent=traceparent) as stream:
            reply = await stream.body_first(body, *headers, **named)
            await stream.end()
        return reply

    async def converse(
        self,
        body: JsonOrBytes = CHAT,
        *answer: JsonOrBytes,
        status: int = 200,
        upstream: str = "",
        content_type: str = "application/json",
        **request: Any,
    ) -> ProcessingResponse:
        """Sends a request and its response to the end; returns the reply to the request's body."""
        async with self.stream() as stream:
            reply = await stream.ask(body, **request)
            await stream.answer(
                *answer, status=status, upstream=upstream, content_type=content_type
            )
        return reply


@asynccontextmanager
async def running(server: GrpcServer, **options: int) -> AsyncIterator[grpc.aio.Channel]:
    port = await server.start("127.0.0.1:0")
    try:
        arguments = [(f"grpc.{name}", value) for name, value in options.items()]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", arguments) as channel:
            yield channel
    finally:
        await server.stop(0)


def as_bytes(body: JsonOrBytes) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def headers_message(headers: dict[str, str], end_of_stream: bool) -> HttpHeaders:
    items = [HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
    return HttpHeaders(headers=HeaderMap(headers=items), end_of_stream=end_of_stream)


def _listed(key: str, names: list[str]) -> Struct:
    values = [Value(string_value=name) for name in names]
    return Struct(fields={key: Value(list_value=ListValue(values=values))})


def attributes_of(
    texts: dict[str, str], numbers: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Struct]:
    fields = {name: Value(string_value=text) for name, text in texts.items()}
    fields |= {name: Value(number_value=number) for name, number in numbers.items()}
    return {"envoy.filters.http.ext_proc": Struct(fields=fields)}
