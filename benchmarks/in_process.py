"""A router in this process under a virtual clock: whole requests without gRPC, Envoy or Redis."""

import asyncio
from collections import deque
from itertools import cycle
from random import Random
from typing import Any, cast

import grpc
from prometheus_client import CollectorRegistry

from benchmarks import states
from benchmarks.overhead.client import request
from extproc.config import Config
from extproc.lab.replay.routers import VirtualClock
from extproc.proxy import messages
from extproc.proxy.app import build
from extproc.proxy.proto.ext_proc_pb2 import ProcessingRequest
from extproc.proxy.service import GrpcServer

_PORT = 8000
_BODIES = 64  # different prompts
_RATE = 300.0  # requests per second
_POLL_INTERVAL_S = 0.2  # between two polls of a replica


class RequestLoad:
    """Load of a router: each :meth:`step` begins a request and ends the oldest.

    ``in_flight`` requests stay in flight. Envoy does not forward responses to the router.
    """

    def __init__(self, replicas: int, in_flight: int) -> None:
        self._clock, self._random = VirtualClock(), Random(1)
        config = Config.model_validate({"route": {"seed": 1}})
        self._services = build(config, CollectorRegistry(), self._clock, self._clock)
        self._server = GrpcServer(self._services)
        self._messages = cycle([_message(number) for number in range(_BODIES)])
        self._names = states.addresses(replicas, _PORT)
        self._to_poll = cycle(self._names)
        self._pause = _POLL_INTERVAL_S / replicas
        self._clock.time = self._polled_at = 1.0
        for name in self._names:
            self._poll(name)
        self._services.fleet.members_known.set()
        self._size = in_flight
        self._in_flight: deque[tuple[_EnvoyStream, asyncio.Task[None]]] = deque()

    async def step(self) -> None:
        """Begins a request, up to the router's reply; ends the oldest if over ``in_flight`` run."""
        self._wait()
        envoy = _EnvoyStream(next(self._messages))
        context = cast("grpc.aio.ServicerContext[Any, Any]", envoy)
        serving = asyncio.ensure_future(self._server._process(None, context))
        await envoy.replied.wait()
        self._in_flight.append((envoy, serving))
        if len(self._in_flight) > self._size:
            self._wait()
            envoy, serving = self._in_flight.popleft()
            envoy.ended.set_result(None)
            await serving

    def _wait(self) -> None:
        until = self._clock.time + 0.5 / _RATE
        while self._polled_at + self._pause <= until:
            self._polled_at = self._clock.time = self._polled_at + self._pause
            self._poll(next(self._to_poll))
        self._clock.time = until

    def _poll(self, name: str) -> None:
        self._services.fleet.put(states.state(name, self._clock.time, self._random))


class _EnvoyStream:
    """Envoy's end of a stream, as the router sees it."""

    def __init__(self, message: bytes) -> None:
        self._message: bytes | None = message
        self.replied = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def read(self) -> Any:
        message, self._message = self._message, None
        if message is None:
            await self.ended
            return grpc.aio.EOF
        return message

    async def write(self, _: bytes) -> None:
        self.replied.set()

    def invocation_metadata(self) -> tuple[()]:
        return ()


def _message(number: int) -> bytes:
    """First message of a request: a chat of 3.7 kB, with the headers as attributes."""
    _, _, body = request().partition(b"\r\n\r\n")
    body = body.replace(b"tell me", b"tell %d" % number, 1)
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = body, True
    message.protocol_config.request_body_mode = messages.BUFFERED
    headers = {
        ":path": "/v1/chat/completions",
        "x-request-id": f"request-{number}",
        "content-length": str(len(body)),
        messages.RESPONSE_SKIPPED: "1",
    }
    fields = message.attributes["envoy.filters.http.ext_proc"].fields
    for name, value in headers.items():
        fields[messages.expression_of(name)].string_value = value.encode()
    return message.SerializeToString()
