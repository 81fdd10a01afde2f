"""Any body is either measured, with a plausible profile, or refused with an error."""

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.endpoint import Endpoint
from extproc.request.errors import BadRequest, error_body
from extproc.request.inspect import inspect
from extproc.request.profile import RequestProfile
from tests.request.conftest import counter_of

COUNTER = counter_of()

numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**400), 1e30, 2**63, True, 0, -1, "1", "abc"]),
)
roles = st.sampled_from(["assistant", "user", "system"])
scalars = st.one_of(st.none(), st.booleans(), numbers, roles, st.text(max_size=8))
KEYS = [
    "role", "content", "type", "text", "image_url", "input_image", "input", "tool_calls",
    "function", "arguments", "name", "tool_use", "tool_result", "source", "documents", "queries",
    "items", "text_1", "text_2", "output", "summary",
]  # fmt: skip
PROMPTS = [
    "messages", "prompt", "input", "instructions", "system", "tools", "query", "queries",
    "documents", "items", "text_1", "text_2", "data_1", "data_2", "stream",
]  # fmt: skip
BOUNDS = ["max_tokens", "max_completion_tokens", "max_output_tokens", "n", "truncate_prompt_tokens"]
words = st.sampled_from(KEYS)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(words | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)
fields = st.fixed_dictionaries(
    {"model": st.text(min_size=1, max_size=8)},
    optional={**dict.fromkeys(PROMPTS, values), **dict.fromkeys(BOUNDS, numbers | values)},
)
JSON_ENDPOINTS = [endpoint for endpoint in Endpoint if not endpoint.takes_audio]
endpoints = st.sampled_from(Endpoint)


def check(endpoint: Endpoint, body: bytes, **options: Any) -> RequestProfile | None:
    """Return a plausible profile; None: the body was refused with an error message."""
    try:
        got = inspect(endpoint, body, COUNTER, **options)
    except BadRequest as error:
        refusal = error_body(error)
    else:
        check_sane(got, endpoint)
        return got
    assert json.loads(refusal)["error"]["message"]
    return None


def measured(endpoint: Endpoint, body: bytes, **options: Any) -> RequestProfile:
    got = check(endpoint, body, **options)
    assert got is not None
    return got


def check_sane(got: RequestProfile, endpoint: Endpoint) -> None:
    assert got.endpoint is endpoint or endpoint is Endpoint.INVOCATIONS
    assert type(got.prompt_tokens) is int
    assert 0 <= got.prompt_tokens <= 10_000_000
    assert type(got.prompt_bytes) is int
    assert 0 <= got.prompt_bytes <= 40_000_000
    if got.endpoint.decodes:
        assert got.output_bound is None or 1 <= got.output_bound <= 10_000_000
        assert 1 <= got.sequences <= 100_000
    else:
        assert (got.output_bound, got.sequences) == (0, 0)
    assert 0 <= got.longest_prompt <= got.prompt_tokens * 1.001
    prefix = got.prefix
    assert 0 <= prefix.previous_tokens <= got.prompt_tokens * 1.001
    assert 0 <= prefix.unit < math.inf
    assert bool(prefix.previous_key) <= bool(prefix.previous_tokens)


@given(endpoints, st.binary(max_size=64))
def test_any_bytes_are_measured_or_refused(endpoint: Endpoint, body: bytes) -> None:
    check(endpoint, body)
    check(endpoint, body, partial=True, content_length=len(body) * 2)


@given(st.sampled_from(JSON_ENDPOINTS), fields, st.integers(0, 400))
def test_any_fields_are_measured(endpoint: Endpoint, body: dict[str, Any], cut: int) -> None:
    encoded = json.dumps(body).encode()
    got = measured(endpoint, encoded)
    assert got.model == body["model"]
    assert check(endpoint, encoded[:cut], partial=True, content_length=len(encoded)) is not None


REFUSED = {
    "empty": b"",
    "blank": b"  \n",
    "not JSON": b"model=m",
    "invalid UTF-8": b'{"model": "m", "prompt": "\xff\xfe"}',
    "UTF-16": '{"model": "m"}'.encode("utf-16"),
    "trailing data": b'{"model": "m"} x',
    "broken off": b'{"model": "m", "prompt": "ab',
    "lists 10,000 deep": b'{"model": "m", "prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "objects 10,000 deep": b'{"model": ' * 10_000 + b"1" + b"}" * 10_000,
    "100,000 digits": b'{"model": "m", "n": ' + b"9" * 100_000 + b"}",
    "a list": b'[{"model": "m"}]',
    "a string": b'"model"',
    "null": b"null",
    "model 1": b'{"model": 1}',
    "model a list": b'{"model": ["m"]}',
    "model of 513 characters": b'{"model": "' + b"m" * 513 + b'"}',
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_body_that_no_replica_could_serve_is_refused(body: bytes) -> None:
    for endpoint in JSON_ENDPOINTS:
        assert check(endpoint, body) is None


ROUTED = {
    "nothing but a model": b'{"model": "m"}',
    "byte order mark": b'\xef\xbb\xbf{"model": "m"}',
    "model of 512 characters": b'{"model": "' + b"m" * 512 + b'"}',
    "no messages": b'{"model": "m", "messages": []}',
    "messages a string": b'{"model": "m", "messages": "hello"}',
    "messages numbers": b'{"model": "m", "messages": [1, 2.5, null, [], {}]}',
    "content a number": b'{"model": "m", "messages": [{"role": "user", "content": 3}]}',
    "NaN": b'{"model": "m", "max_tokens": NaN, "n": -Infinity}',
    "1e30": b'{"model": "m", "max_tokens": 1e30, "n": 1e30, "max_output_tokens": 1e400}',
    "10**400": b'{"model": "m", "max_tokens": 1' + b"0" * 400 + b', "n": 1' + b"0" * 400 + b"}",
    "a key twice": b'{"model": 1, "model": "m"}',
    "100 deep": b'{"model": "m", "messages": ' + b"[" * 100 + b"]" * 100 + b"}",
    "content 150 deep": b'{"model": "m", "messages": ['
    + b'{"content":' * 150
    + b'"x"'
    + b"}" * 150
    + b"]}",
}


@pytest.mark.parametrize("body", [b'{"prompt": "x"}', b'{"model": null}', b'{"model": ""}'])
@pytest.mark.parametrize("default", ["", "m"])
def test_request_without_a_model_is_for_the_default(body: bytes, default: str) -> None:
    for endpoint in JSON_ENDPOINTS:
        got = measured(endpoint, body, model_of=lambda requested, _: requested or default)
        assert got.model == default


@pytest.mark.parametrize("body", ROUTED.values(), ids=ROUTED)
def test_body_that_a_replica_may_reject_is_routed(body: bytes) -> None:
    for endpoint in JSON_ENDPOINTS:
        assert measured(endpoint, body).model == ("m" * 512 if b"m" * 512 in body else "m")


def test_model_between_very_long_prompts_is_found() -> None:
    text = b'"' + b"sea " * 2**18 + b'"'
    body = b'{"prompt": ' + text + b', "model": "m", "input": [' + (text + b",") * 10 + b"1]}"
    assert measured(Endpoint.CHAT, body).model == "m"


@pytest.mark.parametrize(("before", "after"), [("[", "]"), ("[[", "]]")])
def test_million_token_ids_are_estimated(before: str, after: str) -> None:
    ids = ", ".join(map(str, range(1_500_000)))
    body = f'{{"model": "m", "prompt": {before}{ids}{after}, "max_tokens": 9}}'
    got = measured(Endpoint.COMPLETIONS, body.encode())
    assert got.output_bound == 9
    assert got.prompt_tokens == pytest.approx(1_500_000, rel=0.2)


def test_long_text_full_of_commas_is_measured_by_its_length() -> None:
    text = "seven, eight, nine,\n" * 300_000
    body = json.dumps({"model": "m", "prompt": text, "max_tokens": 9}).encode()
    got = measured(Endpoint.COMPLETIONS, body)
    assert got.output_bound == 9
    assert got.prompt_tokens == pytest.approx(COUNTER.count("m", [text]), rel=0.06)


SMALL_VALUES = {
    "empty objects": "{}",
    "empty lists": "[]",
    "objects of one list": '{"a": []}',
    "messages": '{"role": "user", "content": "a"}',
    "parts": '{"type": "text", "text": "a"}',
    "tool calls": '{"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}',
    "lists in lists": "[" * 100 + '"a"' + "]" * 100,
    "objects in objects": '{"a": ' * 100 + "1" + "}" * 100,
    "strings": '""',
    "numbers": "1",
    "schemas": '{"a": {"type": "string"}, "b": {"enum": ["x", "y"]}}',
}
FIELDS = ["messages", "tools", "prompt", "input", "documents", "unknown"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", SMALL_VALUES.values(), ids=SMALL_VALUES)
def test_megabyte_of_small_values_is_not_read_whole(field: str, value: str) -> None:
    """Reading the whole body would keep the router busy for up to two seconds."""
    many = ",".join([value] * (900_000 // len(value)))
    body = f'{{"model": "m", "{field}": [{many}], "max_tokens": 9, "unknown": [{many}]}}'
    got = measured(Endpoint.CHAT, body.encode())
    assert got.model == "m"
    assert got.output_bound is None  # neither in the beginning nor at the end
    assert len(body) / 16 < got.prompt_tokens < len(body) * 2


@pytest.mark.parametrize(
    ("value", "times"),
    [
        ('{"role": "user", "content": "and what of the following?"}', 8_000),
        ('{"content": [{"type": "text", "text": "' + "seven, eight or nine. " * 40 + '"}]}', 2_500),
        ('{"content": "' + r"{\"name\": \"seven\", \"value\": [7, 8]}\n" * 10_000 + '"}', 1),
    ],
    ids=["8,000 messages", "2 MB of text", "half a megabyte of JSON as text"],
)
def test_ordinary_body_is_read_whole(value: str, times: int) -> None:
    many = ",".join([value] * times)
    body = f'{{"model": "m", "messages": [{many}], "max_tokens": 9, "unknown": "{"x" * 20_000}"}}'
    got = measured(Endpoint.CHAT, body.encode())
    assert got.output_bound == 9
    assert got.prompt_bytes > 0


@pytest.mark.parametrize("unit", [b"1,", b"a", b"1, [2], "])
def test_body_without_a_prompt_is_measured_in_little_time(unit: bytes) -> None:
    first_half = b'{"model": "m", "unknown": "' + unit * (5_000 // len(unit)) + b"!"
    body = first_half + b"." * len(first_half) + b'"}'
    started = time.process_time()
    for _ in range(20):
        assert measured(Endpoint.CHAT, body).model == "m"
    assert time.process_time() - started < 0.5


def test_150_000_token_ids_are_counted() -> None:
    ids = list(range(150_000))
    got = measured(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": ids}).encode())
    assert got.prompt_tokens == 150_000


MANY = "[" + "{}," * 300_000 + "{}]"


@pytest.mark.parametrize(
    "end",
    [
        '"model": "m", "max_tokens": 9, "stream": true, "n": 3}',
        '"stream":true,"n":3,"max_tokens":9,"model":"m"}\n',
        '"model": "m", "max_completion_tokens": 9, "n": 3, "stream": true, "tools": [{"n": 5}]}',
        '"x": [{"model": "no"}], "model": "m", "max_tokens": 9, "stream": true, "n": 3}',
        r'"x": "\"model\": 1, ", "model": "m", "max_tokens": 9, "stream": true, "n": 3}',
    ],
)
def test_fields_after_a_very_long_prompt_are_read(end: str) -> None:
    got = measured(Endpoint.CHAT, f'{{"messages": {MANY}, {end}'.encode())
    assert (got.model, got.output_bound, got.sequences, got.stream) == ("m", 9, 3, True)


@pytest.mark.parametrize(
    "end",
    ['"x": 1}', '"x": {"model": "m"}}', '"x": [{"model": "m"}]}', '"model": ', '"model": "m"', ""],
)
def test_inner_or_cut_model_at_the_end_does_not_count(end: str) -> None:
    got = measured(Endpoint.CHAT, f'{{"messages": {MANY}, {end}'.encode())
    assert got.model == ""


def test_query_for_many_documents_is_counted_without_repeating() -> None:
    documents = b"[" + b"1," * 200_000 + b"1]"
    body = b'{"model": "m", "query": "' + b"x" * 1_000_000 + b'", "documents": ' + documents + b"}"
    got = measured(Endpoint.RERANK, body)
    assert got.prompt_tokens == 10_000_000
