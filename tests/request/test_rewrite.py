"""Another model's name, or vLLM's priority, in a body: the bytes of no other value change."""

import json
import random
import time
from typing import Any

import pytest

from extproc.request.endpoint import Endpoint
from extproc.request.inspect import inspect
from extproc.request.rewrite import rename, with_priority
from tests.request.test_inspect import counter

NAME = 'org/another "one"'
WRITTEN = json.dumps(NAME).encode()


def renamed(body: bytes) -> bytes:
    return rename(Endpoint.CHAT, body, NAME)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"model":', b"}"),
        (b'\xef\xbb\xbf \n{"a":1, "model" :\t', b' ,"b":[1]}'),
        (b'{"a":{"model":"m"},"b":["model",{"model":"m"}],"model":', b"}"),
        (b'{"a":"\\"model\\":\\"m\\"","b":"\\\\","model":', b',"c":"}"}'),
        (b'{"model":"other","a":"{[","model":', b"}"),  # of several the last counts
        (b'{"model":"m","a":1,"model":', b"}"),
        (b'{"model":"m","\\u006Dodel":', b"}"),
        (b'{"mod\\u0065l":', b"}"),
    ],
)
def test_the_name_changes_where_it_counts(before: bytes, after: bytes) -> None:
    for name in (b'"m"', b'"\\u006d"'):
        body = before + name + after
        assert inspect(Endpoint.CHAT, body, counter()).asked == "m"
        there = json.loads(body.removeprefix(b"\xef\xbb\xbf"))
        assert json.loads(renamed(body)) == there | {"model": NAME}


def test_bytes_of_other_values_stay() -> None:
    values = b'"a":1.0e2,"b":[ 1,\t"\\u00e9\\/"],"c":{"model" : "m"}'
    assert renamed(b"{" + values + b',"model":"m"}') == (
        b"{" + values + b',"model":' + WRITTEN + b"}"
    )


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity"])
def test_model_is_renamed_beside_numbers_that_json_does_not_have(number: bytes) -> None:
    body = b'{"x":{"model":"m"},"n":' + number + b',"model":"m"}'
    before, _, after = body.rpartition(b'"m"')
    assert renamed(body) == before + WRITTEN + after


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_body_that_nests_too_deep_passes_unchanged(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    body = b'{"model":"m","a":' + opening * 100_000 + b"1" + closing * 100_000 + b"}"
    assert renamed(body) is body


def test_any_order_of_any_fields() -> None:
    draw = random.Random(0)
    for _ in range(200):
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": 'x"\\{[' * draw.randrange(5), "model": "m"}],
            "metadata": {"model": "m"},
            "n": 1,
            "model": "m",
        }
        order = draw.sample(list(fields), len(fields))
        body = {name: fields[name] for name in order}
        got = renamed(json.dumps(body, indent=draw.choice([None, 2])).encode())
        assert json.loads(got) == body | {"model": NAME}


@pytest.mark.parametrize("body", [b"{}", b'{"a":{"model":"m"}}', b'{"x":"model"}'])
def test_where_none_is_named_there_is_nothing_to_change(body: bytes) -> None:
    assert renamed(body) is body


@pytest.mark.parametrize(
    "cut", [b'{"model":"m","x":"{', b'{"model":"m","x":"\\', b'{"model":"m","']
)
def test_of_a_body_that_was_cut_the_beginning_will_do(cut: bytes) -> None:
    assert renamed(cut) == cut.replace(b'"m"', WRITTEN)


def test_of_a_body_too_large_to_be_read_whole_the_end_will_do() -> None:
    body = (
        b'{"messages":[' + b"{}," * 2_000_000 + b'{}],"metadata":{"model":"y"},"model":"m","n":1}'
    )
    assert inspect(Endpoint.CHAT, body, counter()).asked == "m"
    got = renamed(body)
    assert got == body.replace(b'"model":"m"', b'"model":' + WRITTEN)


@pytest.mark.parametrize("unit", [b"[", b'"",', b"{},", b'"\\"",', b'"model":"m",', b"\\\\"])
def test_takes_little_time_whatever_it_is(unit: bytes) -> None:
    body = b'{"x":[' + unit * (20_000_000 // len(unit))
    started = time.process_time()
    renamed(body)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("padding", [0, 50_000])
def test_a_form_is_changed_too(padding: int) -> None:
    def form(model: str) -> bytes:
        file = b'; name="file"\r\nContent-Type: audio/mpeg\r\n\r\n' + bytes(padding)
        parts = (file, f'; name="model"\r\n\r\n{model}'.encode(), b'; name="x"\r\n\r\nm')
        head = b"--b\r\nContent-Disposition: form-data"
        return b"".join(head + part + b"\r\n" for part in parts) + b"--b--\r\n"

    assert rename(Endpoint.TRANSCRIPTIONS, form("m"), "whisper-b") == form("whisper-b")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","n":1}',
        b'\xef\xbb\xbf {"a": {"priority": "}"}, "b": [{}] } \n',
        b'{"priority":-1000}',
        b'{"\\u0070riority":null,"a":{}}',
        b'{"priority":[{"priority":3}]}',
        b"{ }",
    ],
)
def test_it_counts_whatever_a_client_said(body: bytes) -> None:
    got = with_priority(body, -7)
    assert json.loads(got.removeprefix(b"\xef\xbb\xbf")) == {
        **json.loads(body.removeprefix(b"\xef\xbb\xbf")),
        "priority": -7,
    }


@pytest.mark.parametrize(
    ("body", "claims"),
    [
        (b'{"model":"m"}', False),
        (b'{"model":"m","a":{"priority":1}}', False),
        (b'{"\\u0070riority":0,"model":"m"}', True),
        (b'{"priority":null}', True),
    ],
)
def test_what_a_client_said_is_seen(body: bytes, claims: bool) -> None:
    assert inspect(Endpoint.CHAT, body, counter()).claims_priority is claims


def test_of_a_body_that_is_not_read_whole_it_may_have_said_so() -> None:
    body = b'{"model":"m","messages":[' + b"{}," * 2_000_000 + b"{}]}"
    assert inspect(Endpoint.CHAT, body, counter()).claims_priority
    assert inspect(Endpoint.CHAT, b'{"model":"m","x":1', counter(), partial=True).claims_priority
