"""Any messages of a stream get their replies, and leave ledger, queue and memory as before."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from betterproto2 import which_one_of
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.proxy.body_memory import BodyMemory
from extproc.proxy.services import Services
from tests.examples import examples
from tests.fakes import ManualClock, replica
from tests.proxy.conftest import config_of, put_replicas, router_of, samples, with_fleet
from tests.proxy.envoy_side import (
    CHAT,
    REQUEST_TRAILERS,
    RESPONSE_TRAILERS,
    Local,
    LocalCall,
    body_first,
    response_headers,
)
from tests.proxy.envoy_side import DUPLEX as DUPLEX_MODES
from tests.proxy.envoy_side import EVENTS as EVENT_STREAM
from tests.proxy.envoy_side import request_body as chunk
from tests.proxy.envoy_side import request_headers as headers
from tests.proxy.envoy_side import response_body as response_chunk
from tests.proxy.replies import BodyMode

BODY = json.dumps(CHAT).encode()
MEMORY = 350_000  # bytes: three of the long bodies below
KV_TOKENS = 42_000


async def settle() -> None:
    """Lets every stream proceed as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)


CONTROLS: dict[str, Callable[[LocalCall], object]] = {
    "end": lambda call: call.context.messages.put_nowait(grpc.aio.EOF),
    "reset": LocalCall.cancel,
    "stop": lambda call: call.context.reads_replies.clear(),
    "go on": lambda call: call.context.reads_replies.set(),
}


BUFFERED, DUPLEX = headers(), headers(**DUPLEX_MODES)
FIRST = body_first(CHAT)
GZIPPED = headers(headers={"content-encoding": "gzip"})
answer = partial(response_headers, content_type=EVENT_STREAM)
USAGE = response_chunk(b'{"usage": {"completion_tokens": 3}}')

CONVERSATIONS: list[tuple[list[ProcessingRequest], list[str], int, dict[str, int]]] = [
    ([], [], 0, {}),
    ([FIRST], ["request_body"], 1, {"routed": 1}),
    ([FIRST, FIRST, BUFFERED], ["request_body"] * 2 + ["request_headers"], 1, {"routed": 1}),
    ([BUFFERED], ["request_headers"], 0, {}),
    ([BUFFERED, chunk(BODY)], ["request_headers", "request_body"], 1, {"routed": 1}),
    ([BUFFERED, chunk(BODY), answer("200")],
     ["request_headers", "request_body", "response_headers"], 1, {"routed": 1}),
    ([BUFFERED, chunk(BODY), answer("200"), response_chunk(b"{", False)],
     ["request_headers", "request_body", "response_headers", "response_body"], 1, {"routed": 1}),
    ([GZIPPED, GZIPPED], ["request_headers"] * 2, 1, {"routed": 1}),
    ([answer("200"), USAGE, REQUEST_TRAILERS, RESPONSE_TRAILERS, ProcessingRequest()],
     ["response_headers", "response_body", "request_trailers", "response_trailers", ""], 0, {}),
    ([BUFFERED, chunk(BODY), answer("200"), USAGE],
     ["request_headers", "request_body", "response_headers", "response_body"], 1, {"routed": 1}),
    ([answer("200"), chunk(BODY), BUFFERED, chunk(BODY)],
     ["response_headers", "request_body", "request_headers", "request_body"], 1, {"routed": 1}),
    ([BUFFERED, chunk(b"[]")], ["request_headers", "immediate_response"], 0, {"refused": 1}),
    ([BUFFERED, chunk(b"[]"), chunk(BODY)],
     ["request_headers", "immediate_response", "request_body"], 0, {"refused": 1}),
    ([headers("/tokenize", body_mode=BodyMode.NONE), answer("200")],
     ["request_headers", "response_headers"], 0, {"passed": 1}),
    ([DUPLEX, chunk(BODY[:9], False)], [], 0, {}),
    ([DUPLEX, chunk(BODY[:9], False), chunk(BODY[9:]), chunk(BODY[9:])],
     ["request_headers", "request_body"], 1, {"routed": 1}),
    ([DUPLEX, chunk(BODY, False), REQUEST_TRAILERS], ["request_headers"], 1, {"routed": 1}),
    ([DUPLEX, chunk(b"no json")], ["immediate_response"], 0, {"refused": 1}),
]  # fmt: skip
"""Messages in; phases of the replies, requests in flight, and what is counted before the end."""


@pytest.mark.parametrize(("sent", "phases", "in_flight", "counted"), CONVERSATIONS)
@pytest.mark.parametrize("leave", ["end", "reset"])
async def test_stream_answers_each_message_and_leaves_nothing(
    services: Services, sent: list[ProcessingRequest], phases: list[str],
    in_flight: int, counted: dict[str, int], leave: str,
) -> None:  # fmt: skip
    call, free = Local(services).begin(), services.body_memory.free
    for message in sent:
        await call.write(bytes(message))
    await settle()
    replies = [ProcessingResponse.parse(await call.read()) for _ in phases]
    assert call.context.replies.empty()
    assert [which_one_of(reply, "response")[0] for reply in replies] == phases
    assert services.fleet.in_flight == in_flight
    assert samples(services.metrics.requests) == {(name,): n for name, n in counted.items()}
    CONTROLS[leave](call)
    await settle()
    assert call.serving.done()
    assert (services.fleet.in_flight, services.body_memory.free) == (0, free)
    assert samples(services.metrics.open_streams) == {(): 0}
    backlog = services.fleet.view("llama").backlog.tolist()
    assert backlog == pytest.approx([0, 0], abs=1e-6)


def crowded() -> tuple[Services, ManualClock]:
    clock = ManualClock(1000.0)
    config = config_of(hold={"longest_s": 30.0, "most": 3}, route={"seed": 1})
    services = with_fleet(router_of(config), clock, body_memory=BodyMemory(MEMORY))
    put_replicas(services, kv_tokens=KV_TOKENS)
    return services, clock


def long(name: str) -> bytes:
    """A body of about 25,000 tokens: a replica has room for one."""
    return json.dumps({"model": "llama", "prompt": f"{name} sea " * 17_000}).encode()


LONG = long("a")
LONG_FIRST = [body_first(long(name), "/v1/completions") for name in "bcdefgh"]
FIELDS: list[dict[str, Any]] = [
    {"model": "nobody's"}, {"model": 5}, {"n": 3}, {"stream": True}, {"max_tokens": 5},
    {"messages": "hello"}, {"input": "hello"},
]  # fmt: skip
SOME = [
    *([message] for message in LONG_FIRST),
    *([BUFFERED, chunk(long(name))] for name in "ij"),
    *([DUPLEX, chunk(long(name)[:50_000], False), chunk(long(name)[50_000:])] for name in "kl"),
    *([DUPLEX, chunk(LONG[:70_000], False)], [chunk(LONG[70_000:])], [DUPLEX, chunk(BODY, False)]),
    *([FIRST], [DUPLEX, chunk(b"x" * 90_000, False)], [DUPLEX], [BUFFERED]),
    *(
        [answer("200"), USAGE],
        [answer("503", end_of_stream=True)],
        [REQUEST_TRAILERS],
        [headers(body_mode=BodyMode.NONE)],
    ),
    *(
        [answer("?")],
        [response_chunk(b'data: {"choices": [{"delta": {"content": "sea"}}]}\n\n', False)],
    ),
    *([response_chunk(b'{"id": "resp_1"}')], [response_chunk(b"\xff", False)], [RESPONSE_TRAILERS]),
    *([BUFFERED, chunk(json.dumps(CHAT | more).encode())] for more in FIELDS),
    *([headers(path, body_mode=BodyMode.STREAMED)] for path in ("/v1/responses", "/v1/models")),
    *([chunk(b"{", False)], [chunk(b"\xff")], [ProcessingRequest()]),
]
"""Messages that a stream receives together, in any state."""
WHO = st.integers(0, 4)
EVENTS = st.one_of(
    *(st.tuples(WHO, st.integers(0, len(SOME) - 1)) for _ in range(4)),
    st.tuples(WHO, st.sampled_from([*CONTROLS])),
    st.tuples(st.just("hangs"), st.sampled_from([replica(1), replica(2)])),
    st.tuples(st.just("seconds"), st.sampled_from([0.01, 1.0, 40.0])),
)


async def play(events: list[tuple[Any, Any]]) -> None:
    services, clock = crowded()
    router = Local(services)
    exchanges = router.server._exchanges
    calls: dict[int, LocalCall] = {}
    begun: list[LocalCall] = []
    for who, event in [(5, 0), (6, 1), *events]:  # no replica has room for another long request
        if who == "seconds":
            clock.advance(event)
            put_replicas(services, kv_tokens=KV_TOKENS)
            services.queue.sweep()
        elif who == "hangs":
            for exchange in exchanges:
                exchange.end_if_hung({event})
        else:
            call = calls.get(who)
            if call is None or call.serving.done():
                call = calls[who] = router.begin()
                begun.append(call)
            if event in CONTROLS:
                CONTROLS[event](call)
            else:
                for message in SOME[event]:
                    await call.write(bytes(message))
        await settle()
        held = sum(exchange.body.size for exchange in exchanges)
        assert services.body_memory.free == MEMORY - held
    for call in reversed(begun):  # a waiting request before the request that it waits for
        call.cancel()
    await settle()
    assert not exchanges
    for call in begun:
        assert isinstance(call.error, grpc.aio.BaseError | None)
    assert (services.fleet.in_flight, len(services.queue)) == (0, 0)
    assert services.body_memory.free == MEMORY


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(EVENTS, min_size=20, max_size=60))
def test_any_messages_leave_ledger_and_memory_as_before(events: list[tuple[Any, Any]]) -> None:
    asyncio.run(play(events))
