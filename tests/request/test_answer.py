"""The name that was asked for, in responses."""

import json
import random

import pytest

from extproc.request.rewrite import AnswerNamer

SERVED, ASKED = 'org/b "1"', "the-model"
WHOLE = json.dumps({"id": "1", "model": SERVED, "text": f'"model":"{SERVED}"', "x": ["model"]})
EVENTS = "".join(
    f"event: x\ndata: {json.dumps(event, separators=(',', ':'))}\n\n"
    for event in (
        {"type": "message_start", "message": {"model": SERVED, "content": '{"model":"a"'}},
        {"type": "delta", "model": SERVED},
        {"type": "delta", "model": "another"},
        {"type": "delta", "delta": '"model":'},
    )
)


@pytest.mark.parametrize("body", [WHOLE, EVENTS])
def test_it_is_in_the_place_of_the_replicas_name(body: str) -> None:
    expected = body
    for key in ('"model":', '"model": '):
        expected = expected.replace(key + json.dumps(SERVED), f'{key}"{ASKED}"')
    assert expected != body
    assert AnswerNamer(SERVED, ASKED).feed(body.encode(), last=True) == expected.encode()


@pytest.mark.parametrize("body", [WHOLE.encode(), EVENTS.encode(), b'{"model":"org', b'"model": '])
def test_however_it_is_split(body: bytes) -> None:
    expected = AnswerNamer(SERVED, ASKED).feed(body, last=True)
    draw = random.Random(0)
    for _ in range(300):
        namer, got, rest = AnswerNamer(SERVED, ASKED), b"", body
        while rest:
            size = draw.randrange(len(rest) + 1)
            got += namer.feed(rest[:size], last=False)
            rest = rest[size:]
        assert got + namer.feed(b"", last=True) == expected


def test_a_whole_event_is_not_held_back() -> None:
    event = b'data: {"model":"m","choices":[{"delta":{"content":"model"}}]}\n\n'
    assert AnswerNamer("x", "y").feed(event, last=False) == event
