"""The coroutine of a stream without gRPC: messages in, messages out, and the ledger after."""

import asyncio
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from betterproto2 import which_one_of
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.proxy.body_memory import BodyMemory
from extproc.proxy.call import Call
from extproc.proxy.exchange import Exchange
from extproc.proxy.services import Services
from extproc.proxy.stream import stream
from extproc.route.queue import Queue
from tests.fakes import ManualClock, fleet_of, replica, state
from tests.proxy.conftest import config_of, on_fleet, router_of, samples
from tests.proxy.envoy_side import CHAT, Stream, headers_message
from tests.proxy.replies import BodyMode

BODY = json.dumps(CHAT).encode()
MEMORY = 350_000  # bytes: three of the long bodies below
KV_TOKENS = 42_000


class Envoy:
    """Envoy's end of a stream, in place of gRPC's context."""

    def __init__(self, services: Services) -> None:
        self.replies: list[ProcessingResponse] = []
        self.reads = asyncio.Event()  # clear: it takes no reply
        self.reads.set()
        self._messages: asyncio.Queue[object] = asyncio.Queue()
        self._reset = asyncio.get_running_loop().create_future()
        call = Call(cast("grpc.aio.ServicerContext", self), self._reset)
        self.exchange = Exchange(services, call)
        self.serving = asyncio.create_task(stream(self.exchange))
        self.errors: list[BaseException] = []
        self.serving.add_done_callback(self._ended)

    def _ended(self, serving: asyncio.Task[None]) -> None:
        error = None if serving.cancelled() else serving.exception()
        if error is not None and not isinstance(error, grpc.aio.BaseError):
            self.errors.append(error)

    def send(self, message: ProcessingRequest) -> None:
        self._messages.put_nowait(bytes(message))

    def end(self) -> None:
        self._messages.put_nowait(grpc.aio.EOF)

    def reset(self) -> None:
        self._reset.cancel()
        self.reads.set()
        self._messages.put_nowait(grpc.aio.UsageError("reset"))

    async def read(self) -> object:
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def write(self, reply: bytes) -> None:
        await self.reads.wait()
        if self._reset.cancelled():
            raise grpc.aio.UsageError("reset")
        self.replies.append(ProcessingResponse.parse(reply))


async def settle() -> None:
    """Lets every stream go on as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)


def headers(mode: BodyMode, end: bool = False, path: str = "/v1/chat/completions") -> Any:
    response = mode if mode == BodyMode.FULL_DUPLEX_STREAMED else BodyMode.NONE
    return ProcessingRequest(
        request_headers=headers_message({":method": "POST", ":path": path}, end_of_stream=end),
        protocol_config=ProtocolConfiguration(request_body_mode=mode, response_body_mode=response),
    )


def chunk(body: bytes, end: bool = True) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=end))


def answer(status: int, end: bool = False) -> ProcessingRequest:
    told = {":status": str(status), "content-type": "application/json"}
    return ProcessingRequest(response_headers=headers_message(told, end_of_stream=end))


BUFFERED, DUPLEX = headers(BodyMode.BUFFERED), headers(BodyMode.FULL_DUPLEX_STREAMED)
FIRST = Stream(None).body_message(CHAT)
GZIPPED = deepcopy(BUFFERED)
GZIPPED.request_headers.headers.headers.append(
    HeaderValue(key="content-encoding", raw_value=b"gzip")
)
AFTER = ProcessingRequest(response_trailers=HttpTrailers(trailers=HeaderMap()))
TRAILERS = ProcessingRequest(request_trailers=HttpTrailers(trailers=HeaderMap()))
USAGE = ProcessingRequest(
    response_body=HttpBody(body=b'{"usage": {"completion_tokens": 3}}', end_of_stream=True)
)

CONVERSATIONS: list[tuple[list[ProcessingRequest], list[str], int, dict[str, int]]] = [
    ([], [], 0, {}),
    ([FIRST], ["request_body"], 1, {"routed": 1}),
    ([FIRST, FIRST, BUFFERED], ["request_body"] * 2 + ["request_headers"], 1, {"routed": 1}),
    ([BUFFERED], ["request_headers"], 0, {}),
    ([GZIPPED, GZIPPED], ["request_headers"] * 2, 1, {"routed": 1}),
    ([answer(200), USAGE, TRAILERS, AFTER, ProcessingRequest()],
     ["response_headers", "response_body", "request_trailers", "response_trailers", ""], 0, {}),
    ([BUFFERED, chunk(BODY), answer(200), USAGE],
     ["request_headers", "request_body", "response_headers", "response_body"], 1, {"routed": 1}),
    ([answer(200), chunk(BODY), BUFFERED, chunk(BODY)],
     ["response_headers", "request_body", "request_headers", "request_body"], 1, {"routed": 1}),
    ([BUFFERED, chunk(b"[]")], ["request_headers", "immediate_response"], 0, {"refused": 1}),
    ([BUFFERED, chunk(b"[]"), chunk(BODY)],
     ["request_headers", "immediate_response", "request_body"], 0, {"refused": 1}),
    ([headers(BodyMode.NONE, path="/tokenize"), answer(200)],
     ["request_headers", "response_headers"], 0, {"passed": 1}),
    ([DUPLEX, chunk(BODY[:9], False)], [], 0, {}),
    ([DUPLEX, chunk(BODY[:9], False), chunk(BODY[9:]), chunk(BODY[9:])],
     ["request_headers", "request_body"], 1, {"routed": 1}),
    ([DUPLEX, chunk(BODY, False), TRAILERS], ["request_headers"], 1, {"routed": 1}),
    ([DUPLEX, chunk(b"no json")], ["immediate_response"], 0, {"refused": 1}),
]  # fmt: skip
"""Messages in; phases of the replies, requests in flight, and what is counted before the end."""


@pytest.mark.parametrize(("sent", "phases", "in_flight", "counted"), CONVERSATIONS)
@pytest.mark.parametrize("leave", [Envoy.end, Envoy.reset])
async def test_stream_answers_each_message_and_leaves_nothing(
    services: Services,
    sent: list[ProcessingRequest],
    phases: list[str],
    in_flight: int,
    counted: dict[str, int],
    leave: Callable[[Envoy], None],
) -> None:
    envoy, free = Envoy(services), services.body_memory.free
    for message in sent:
        envoy.send(message)
    await settle()
    assert [which_one_of(one, "response")[0] for one in envoy.replies] == phases
    assert services.fleet.in_flight == in_flight
    assert samples(services.metrics.requests) == {(name,): n for name, n in counted.items()}
    leave(envoy)
    await settle()
    assert envoy.serving.done()
    assert (services.fleet.in_flight, services.body_memory.free) == (0, free)


def crowded() -> tuple[Services, ManualClock]:
    clock = ManualClock(1000.0)
    config = config_of(hold={"longest_s": 30.0, "most": 3}, route={"seed": 1})
    services = router_of(config)
    fleet = fleet_of(clock, *["llama-8b-a10"] * 2)
    fleet.known.set()
    parts: dict[str, Any] = {"queue": Queue(fleet, config.hold, clock), "clock": clock}
    services = on_fleet(services, fleet, **parts)
    poll(services, clock)
    return replace(services, body_memory=BodyMemory(MEMORY)), clock


def poll(services: Services, clock: ManualClock) -> None:
    for number in (1, 2):
        known = state(number, "llama-8b-a10", clock, kv_tokens=KV_TOKENS, measured=True)
        services.fleet.put(known)


def long(name: str) -> bytes:
    """A body of about 25,000 tokens: a replica carries one of them."""
    return json.dumps({"model": "llama", "prompt": f"{name} sea " * 17_000}).encode()


LONG = long("a")
LONG_FIRST = [Stream(None).body_message(long(name), "/v1/completions") for name in "bcdefgh"]
SOME = [
    *([one] for one in LONG_FIRST),
    *([BUFFERED, chunk(long(name))] for name in "ij"),
    *([DUPLEX, chunk(long(name)[:50_000], False), chunk(long(name)[50_000:])] for name in "kl"),
    *([DUPLEX, chunk(LONG[:70_000], False)], [chunk(LONG[70_000:])], [DUPLEX, chunk(BODY, False)]),
    *([FIRST], [DUPLEX, chunk(b"x" * 90_000, False)], [DUPLEX], [BUFFERED]),
    *([answer(200), USAGE], [answer(503, end=True)], [TRAILERS], [headers(BodyMode.NONE)]),
    *([chunk(b"{", False)], [chunk(b"\xff")], [ProcessingRequest()]),
]
"""Messages that a stream gets at once, in whichever state it is."""
WHO = st.integers(0, 4)
EVENTS = st.one_of(
    *(st.tuples(WHO, st.integers(0, len(SOME) - 1)) for _ in range(4)),
    st.tuples(WHO, st.sampled_from(["end", "reset", "stop", "go on"])),
    st.tuples(st.just("hangs"), st.sampled_from([replica(1), replica(2)])),
    st.tuples(st.just("seconds"), st.sampled_from([0.01, 1.0, 40.0])),
)


async def play(events: list[tuple[Any, Any]]) -> None:
    services, clock = crowded()
    streams: dict[int, Envoy] = {}
    begun: list[Envoy] = []
    for who, event in [(5, 0), (6, 1), *events]:  # no replica has room for another long request
        if who == "seconds":
            clock.advance(event)
            poll(services, clock)
            services.queue.look()
        elif who == "hangs":
            for one in streams.values():
                one.exchange.lose({event})
        else:
            envoy = streams.get(who)
            if envoy is None or envoy.serving.done():
                envoy = streams[who] = Envoy(services)
                begun.append(envoy)
            match event:
                case "end":
                    envoy.end()
                case "reset":
                    envoy.reset()
                case "stop":
                    envoy.reads.clear()
                case "go on":
                    envoy.reads.set()
                case _:
                    for message in SOME[event]:
                        envoy.send(message)
        await settle()
        held = sum(len(one.exchange.body) for one in streams.values())
        assert services.body_memory.free == MEMORY - held
    for envoy in reversed(begun):  # those that wait before those that they wait for
        envoy.reset()
    await settle()
    assert all(one.serving.done() for one in streams.values())
    assert not [one.errors for one in begun if one.errors]
    assert (services.fleet.in_flight, len(services.queue)) == (0, 0)
    assert services.body_memory.free == MEMORY


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, min_size=20, max_size=60))
def test_any_messages_leave_ledger_and_memory_as_before(
    events: list[tuple[Any, Any]],
) -> None:
    asyncio.run(play(events))
