"""Renaming the model, or setting vLLM's priority, changes the bytes of no other value."""

import json
import time

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
        (b'{"model":"other","a":"{[","model":', b"}"),  # the last of several counts
        (b'{"model":"m","a":1,"model":', b"}"),
        (b'{"model":"m","\\u006Dodel":', b"}"),
        (b'{"mod\\u0065l":', b"}"),
    ],
)
def test_model_that_a_decoder_reads_is_renamed(before: bytes, after: bytes) -> None:
    for name in (b'"m"', b'"\\u006d"'):
        body = before + name + after
        assert inspect(Endpoint.CHAT, body, counter()).requested_model == "m"
        there = json.loads(body.removeprefix(b"\xef\xbb\xbf"))
        assert json.loads(renamed(body)) == there | {"model": NAME}


MANY = b'{"messages":[' + b"{}," * 2_000_000 + b"{}]"
KEPT = {
    "other values": b'{"a":1.0e2,"b":[ 1,\t"\\u00e9\\/"],"c":{"model" : "m"},"model":"m"}',
    "NaN, which JSON lacks": b'{"x":{"model":"m"},"n":NaN,"model":"m"}',
    "-Infinity, which JSON lacks": b'{"x":{"model":"m"},"n":-Infinity,"model":"m"}',
    "cut in a text": b'{"model":"m","x":"{',
    "cut in an escape": b'{"model":"m","x":"\\',
    "cut in a key": b'{"model":"m","',
    "end of a large body": MANY + b',"metadata":{"model":"y"},"model":"m","n":1}',
}


@pytest.mark.parametrize("body", KEPT.values(), ids=KEPT)
def test_renaming_keeps_the_bytes_of_other_values(body: bytes) -> None:
    before, _, after = body.rpartition(b'"m"')
    assert renamed(body) == before + WRITTEN + after


@pytest.mark.parametrize(
    "body",
    [
        *(b"{}", b'{"a":{"model":"m"}}', b'{"x":"model"}'),
        b'{"model":"m","a":' + b"[" * 100_000 + b"1" + b"]" * 100_000 + b"}",
        b'{"model":"m","a":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
    ids=["empty", "inner", "text", "deep lists", "deep objects"],
)
def test_body_without_a_readable_model_passes_unchanged(body: bytes) -> None:
    assert renamed(body) is body


@pytest.mark.parametrize("before", [b'{"x":[', b'{"x":{"model":"'])
@pytest.mark.parametrize("unit", [b"[", b'"",', b"{},", b'"\\"",', b'"model":"m",', b"\\\\"])
def test_renaming_takes_little_time_whatever_the_body(before: bytes, unit: bytes) -> None:
    body = before + unit * (20_000_000 // len(unit))
    started = time.process_time()
    renamed(body)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("padding", [0, 50_000])
def test_model_is_renamed_in_a_form(padding: int) -> None:
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
def test_written_priority_replaces_that_of_the_client(body: bytes) -> None:
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
        (MANY + b"}", True),  # the end is not read, so it may have a priority
    ],
    ids=["none", "inner", "escaped", "null", "large"],
)
def test_priority_in_a_body_is_recognised(body: bytes, claims: bool) -> None:
    assert inspect(Endpoint.CHAT, body, counter()).claims_priority is claims
    assert inspect(Endpoint.CHAT, body[:-1], counter(), partial=True).claims_priority
