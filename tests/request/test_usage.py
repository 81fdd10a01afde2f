"""Usage and response id are read from bodies of every API, in chunks split anywhere."""

import itertools
import json
import tracemalloc
from collections.abc import Iterable
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.request import usage
from extproc.request.endpoint import Endpoint
from extproc.request.usage import HEAD_BYTES, ReportedUsage, UsageReader, response_id
from tests.examples import examples

FAKE = 'say "usage": {"prompt_tokens": 666, "completion_tokens": 666} "delta": "text": \\"usage":{}'


def read(chunks: Iterable[bytes], tokens_per_event: float = 1.0) -> ReportedUsage | None:
    reader = UsageReader(Endpoint.CHAT)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.usage(tokens_per_event)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def sse(*events: Any, done: bool = True) -> bytes:
    """Format events as vLLM does: the type of an event also stands on a line of its own."""
    lines = [
        (f"event: {e['type']}\n" if "type" in e else "") + f"data: {compact(e)}\n\n" for e in events
    ]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def chat_chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more}


def text_chunk(text: str) -> dict[str, Any]:
    return {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": text}]}


def ids_chunk(ids: list[int]) -> dict[str, Any]:
    """Return a chunk of ``/inference/v1/generate``, which reports usage only on request."""
    return {"request_id": "g", "choices": [{"index": 0, "token_ids": ids}]}


CHAT_USAGE = {
    "prompt_tokens": 12,
    "total_tokens": 17,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 8},
}
RESPONSES_USAGE = {
    "input_tokens": 12,
    "input_tokens_details": {"cached_tokens": 8, "cached_tokens_per_turn": [8]},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 17,
}
EXPECTED = ReportedUsage(prompt_tokens=12, completion_tokens=5, cached_tokens=8)
ROLE = chat_chunk({"role": "assistant", "content": ""})
CHAT_EVENTS = [ROLE, *[chat_chunk({"content": FAKE}) for _ in range(4)], chat_chunk({})]
FUNCTION = {"name": "f", "parameters": {"properties": {"usage": {"prompt_tokens": "integer"}}}}

RESPONSES: dict[str, bytes] = {
    "chat": compact(
        {
            "id": "c",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": FAKE}}],
            "usage": CHAT_USAGE,
            "prompt_logprobs": None,
        }
    ).encode(),
    "chat, with other figures later": compact(
        {"usage": CHAT_USAGE, "kv_transfer_params": {"usage": {"blocks": 3}}}
    ).encode(),
    "chat, indented": json.dumps(
        {"choices": [{"message": {"content": FAKE}}], "usage": CHAT_USAGE, "x": "y" * 9_000},
        indent=2,
    ).encode(),
    "chat stream": sse(*CHAT_EVENTS, {"id": "c", "choices": [], "usage": CHAT_USAGE}),
    "chat stream, usage in every chunk": sse(
        *[
            chat_chunk({"content": "x"}, usage={**CHAT_USAGE, "completion_tokens": i})
            for i in range(6)
        ]
    ),
    "responses": compact(
        {"output": [{"text": FAKE}], "tools": [FUNCTION], "usage": RESPONSES_USAGE, "user": None}
    ).encode(),
    "responses stream": sse(
        {"type": "response.created", "response": {"usage": None, "tools": [FUNCTION]}},
        *[{"type": "response.output_text.delta", "delta": FAKE} for _ in range(5)],
        {"type": "response.completed", "response": {"usage": RESPONSES_USAGE}},
    ),
    "messages": compact(
        {
            "type": "message",
            "content": [{"type": "tool_use", "input": {"usage": {"input_tokens": 666}}}],
            "usage": {"input_tokens": 4, "output_tokens": 5, "cache_read_input_tokens": 8},
        }
    ).encode(),
    "messages stream": sse(
        {
            "type": "message_start",
            "message": {
                "id": "m",
                "role": "assistant",
                "usage": {"input_tokens": 4, "output_tokens": 0, "cache_read_input_tokens": 8},
            },
        },
        *[
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": FAKE}}
            for _ in range(3)
        ],
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
        done=False,
    ),
}


@pytest.mark.parametrize("body", RESPONSES.values(), ids=RESPONSES)
def test_usage_is_read_from_every_api(body: bytes) -> None:
    assert read([body]) == EXPECTED


RESPONSES_EVENTS = [
    {"type": "response.created", "response": {"text": None, "tools": [FUNCTION]}},
    {"type": "response.in_progress", "response": {"instructions": "\nevent: x"}},
    {"type": "response.output_item.added", "item": {"content": []}},
    {"type": "response.output_text.delta", "delta": FAKE},
]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_responses_stream_generates_from_its_third_event_on(size: int) -> None:
    reader, begun = UsageReader(Endpoint.RESPONSES), 0
    for event in RESPONSES_EVENTS:
        body = sse(event, done=False)
        for i in range(0, len(body), size):
            reader.feed(body[i : i + size])
        begun += reader.generating
    assert begun == 2


def test_other_streams_begin_with_the_first_token() -> None:
    reader = UsageReader(Endpoint.CHAT)
    assert not reader.generating
    reader.feed(sse(ROLE, done=False))
    assert reader.generating


ERROR = {"message": "The engine is currently busy", "type": "Service Unavailable", "code": 503}
FAILED = {
    "chat": b"data: " + json.dumps({"error": ERROR}).encode() + b"\n\ndata: [DONE]\n\n",
    "messages": b"event: error\n" + sse({"type": "error", "error": ERROR}, done=False),
}


@pytest.mark.parametrize("body", FAILED.values(), ids=FAILED)
def test_error_event_is_no_token(body: bytes) -> None:
    reader = UsageReader(Endpoint.CHAT)
    reader.feed(body)
    assert reader.failed
    assert not reader.generating


@pytest.mark.parametrize("body", FAILED.values(), ids=FAILED)
def test_error_event_is_found_byte_by_byte(body: bytes) -> None:
    reader = UsageReader(Endpoint.CHAT)
    for i in range(len(body)):
        assert not reader.failed or i > len(b"event: error")
        reader.feed(body[i : i + 1])
    assert reader.failed


@given(st.text())
def test_generated_text_cannot_fake_an_error(text: str) -> None:
    reader = UsageReader(Endpoint.CHAT)
    reader.feed(sse(text_chunk(f'{text}data: {{"error":{text}event: error\n')))
    assert not reader.failed


STREAMS = {
    **RESPONSES,
    "chat without usage": sse(*CHAT_EVENTS),
    "completions without usage": sse(*[text_chunk(FAKE) for _ in range(5)]),
}


@pytest.mark.parametrize("body", STREAMS.values(), ids=STREAMS)
def test_usage_is_the_same_byte_by_byte(body: bytes) -> None:
    assert read(body[i : i + 1] for i in range(len(body))) == read([body])


@settings(max_examples=examples(200))
@given(st.sampled_from(sorted(STREAMS)), st.data())
def test_usage_is_the_same_however_split(name: str, data: st.DataObject) -> None:
    body = STREAMS[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=30)))
    bounds = [0, *cuts, len(body)]
    split = [body[a:b] for a, b in itertools.pairwise(bounds)]
    assert b"".join(split) == body
    assert read(split) == read([body])


@given(st.text())
def test_generated_text_cannot_fake_usage(text: str) -> None:
    message = {"message": {"content": f'{text}"usage":{compact(CHAT_USAGE)}{text}'}}
    assert read([compact({"choices": [message]}).encode()]) is None


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (sse(*CHAT_EVENTS), 5),
        (sse(*CHAT_EVENTS[:3], done=False), 2),
        (sse(*[text_chunk("x") for _ in range(5)]), 5),
        (sse(*[ids_chunk([7, 8])] * 5), 5),
        (b"\n\n" + sse(*CHAT_EVENTS).replace(b"\n", b"\r\n"), 5),
    ],
    ids=["chat", "chat broken off", "completions", "token ids", "CRLF"],
)
def test_streamed_events_are_counted_without_usage(body: bytes, tokens: int) -> None:
    assert read([body]) == ReportedUsage(None, tokens)
    assert read([body], tokens_per_event=2.5) == ReportedUsage(None, 1 + round(2.5 * (tokens - 1)))


def test_messages_stream_broken_off_keeps_its_prompt() -> None:
    begun = RESPONSES["messages stream"].partition(b"event: message_delta")[0]
    assert read([begun]) == ReportedUsage(12, 3, 8)


@pytest.mark.parametrize(
    "usage",
    [
        *("null", "{}", "[]", "1", '"x"', "{"),
        '{"prompt_tokens": "7"}',
        '{"prompt_tokens": -1, "completion_tokens": true}',
        '{"prompt_tokens": 1e3}',
        '{"prompt_tokens": 1' + "0" * 400 + "}",
        '{"a":' * 2_000 + "}" * 2_000,
    ],
)
def test_malformed_usage_is_ignored(usage: str) -> None:
    assert read([f'{{"choices": [], "usage": {usage}}}'.encode()]) is None


def test_unfinished_objects_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Mock(wraps=usage._decode)
    monkeypatch.setattr(usage, "_decode", decode)
    chunks = [b'{"usage":' * 1_000, compact(CHAT_USAGE).encode()]
    assert read(chunks) == ReportedUsage(12, 5, 8)
    assert decode.call_count == 1


@given(st.lists(st.binary(max_size=20) | st.sampled_from([b'"usage":', b"{", b"}", b"data:"])))
def test_any_bytes_are_accepted(chunks: list[bytes]) -> None:
    read(chunks)


@pytest.mark.parametrize("endless", [b"x", b'"usage":{"a":"' + b"x", b'"usage": ', b"data: "])
def test_memory_is_bounded(endless: bytes) -> None:
    reader = UsageReader(Endpoint.CHAT)
    chunk = endless * 1_000
    tracemalloc.start()
    try:
        for _ in range(50):
            reader.feed(chunk)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 64_000


WHOLE = b'{"id":"resp_12ab","created_at":1,"output":[{"id":"msg_1"}]}'
STREAM = (
    b'event: response.created\ndata: {"response":{"id":"resp_12ab","model":"m"},'
    b'"sequence_number":0,"type":"response.created"}\n\n'
)


@pytest.mark.parametrize("body", [WHOLE, STREAM])
def test_response_id_is_read_once_it_is_whole(body: bytes) -> None:
    end = body.index(b"resp_12ab") + len(b'resp_12ab"')
    for size in range(len(body) + 1):
        assert response_id(body[:size]) == (None if size < end else "resp_12ab")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"id":"chatcmpl-1"}',
        b'{"previous_response_id":"resp_1"}',
        b'{"text":"\\"id\\":\\"resp_1\\""}',
        b'{"id":"resp_' + b"x" * 500 + b'"}',
        b" " * 5_000 + WHOLE,
    ],
)
def test_other_and_late_ids_are_ignored(body: bytes) -> None:
    assert response_id(body[:HEAD_BYTES]) is None


def test_usage_without_completion_tokens_reports_none_generated() -> None:
    body = b'{"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}'
    assert read([body]) == ReportedUsage(7, 0)
