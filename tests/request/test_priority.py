"""vLLM's priority in a body: it is the one that counts, and all else stays."""

import json

import pytest

from extproc.request.endpoint import Endpoint
from extproc.request.inspect import inspect
from extproc.request.rewrite import with_priority
from tests.request.test_inspect import counter


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
