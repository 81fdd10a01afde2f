"""Profiles of request bodies: endpoint, prompt tokens, bounds of the output, flags, audio."""

import json
import math
import time
from typing import Any

import pytest

from extproc.request.endpoint import Endpoint, endpoint_of, stored_response_of
from extproc.request.errors import BadRequest
from extproc.request.inspect import inspect
from extproc.request.profile import RequestProfile
from extproc.request.prompt import TOKENS_PER_MESSAGE, TOKENS_TO_REPLY, VIDEO_TOKENS
from extproc.request.tokens import TokenCounter
from tests.request.conftest import assistant, counter_of, profiled, user

E = Endpoint
IMAGE_TOKENS = 100
FRAME = TOKENS_PER_MESSAGE + TOKENS_TO_REPLY
MINUTE = "AAAA" * (60 * 16_000 // 3)  # a minute of MP3 at 128 kbit/s, in base64
MINUTE_URL = "data:audio/mp3;base64," + MINUTE
DATA_URL = "data:image/png;base64," + "iVBORw0K" * 10_000


def counter() -> TokenCounter:
    """Counts one token per byte."""
    return counter_of(bytes_per_token=1.0, image_tokens=IMAGE_TOKENS)


def profile(endpoint: Endpoint, **fields: Any) -> RequestProfile:
    return profiled(counter(), endpoint, **fields)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize("prefix", ["", "/batch", "/a/b/c/d", "/v1/models"])
def test_endpoint_is_the_end_of_the_path(prefix: str, endpoint: Endpoint) -> None:
    path = prefix + endpoint.value
    assert endpoint_of(path) is endpoint
    assert endpoint_of(f"{path}?api-version=1&x=/v1/models") is endpoint


ALIASES = {
    "/score": E.SCORE,
    "/rerank": E.RERANK,
    "/v2/rerank": E.RERANK,
    "/v2/embed": E.EMBEDDINGS,
    "/detokenize": E.TOKENIZE,
}
WITHOUT_ENDPOINT = [
    *("", "/", "?", "/v1/models", "/health", "/v1/score/", "/V1/Score", "/v1/highscore"),
    *("/v1/chat/completions/render", "/x?/v1/score"),
    *("/v1/responses/resp_1", "/v1/responses/resp_1/cancel"),
]


@pytest.mark.parametrize("path", [*ALIASES, *WITHOUT_ENDPOINT])
def test_only_paths_that_name_a_model_have_an_endpoint(path: str) -> None:
    assert endpoint_of(path) is ALIASES.get(path)


@pytest.mark.parametrize(
    ("path", "response"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1?stream=true", "resp_1"),
        ("/batch/v1/responses/resp_1/cancel", "resp_1"),
        *[("/v1/responses", ""), ("/v1/responses/", ""), ("/v1/responses/a/b", "")],
        *[("/x?/v1/responses/resp_1", ""), ("/v1/models/resp_1", "")],
    ],
)
def test_stored_response_is_read_from_the_path(path: str, response: str) -> None:
    assert stored_response_of(path) == response


def media(kind: str, value: Any) -> list[dict[str, Any]]:
    """Return a question of 3 tokens about a medium."""
    return [user([{"type": "text", "text": "abc"}, {"type": kind, kind: value}])]


CALL = {"id": "x", "type": "function", "function": {"name": "get", "arguments": '{"a":1}'}}
CALLS = assistant(None) | {"tool_calls": [CALL]}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"a": [1, 2]}}}]
ITEMS = [
    user([{"type": "input_text", "text": "abc"}]),
    user([{"type": "input_image", "image_url": DATA_URL}]),
    {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "done"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
]
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA_URL}
RESULT = [{"type": "text", "text": "42"}, {"type": "image", "source": SOURCE}]
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s" * 99}
MESSAGES = [
    user("abc"),
    assistant([THOUGHT, {"type": "tool_use", "id": "t", "name": "get", "input": {"a": 1}}]),
    user([{"type": "tool_result", "tool_use_id": "t", "content": RESULT}]),
]
OF_MESSAGES = 3 + 2 + 3 + len('{"a":1}') + 2 + IMAGE_TOKENS + len("brief")
PROMPTS: list[tuple[Endpoint, dict[str, Any], int, int]] = [
    # endpoint, body, tokens of the content, number of messages
    (E.CHAT, {"messages": [{"role": "system", "content": "12345"}, user("123")]}, 8, 2),
    (E.CHAT, {"messages": [user("héllo 😀")]}, 11, 1),  # bytes of UTF-8
    (E.CHAT, {"messages": [user(["abc", {"type": "refusal", "refusal": "no"}])]}, 5, 1),
    (E.CHAT, {"messages": [user([{"type": "text", "text": "abc"}, {"text": "de"}])]}, 5, 1),
    (E.CHAT, {"messages": [user([{"image_url": DATA_URL}])]}, IMAGE_TOKENS, 1),
    (E.CHAT, {"messages": media("image_url", {"url": DATA_URL})}, 3 + IMAGE_TOKENS, 1),
    (E.CHAT, {"messages": media("video_url", {"url": DATA_URL})}, 3 + VIDEO_TOKENS, 1),
    (E.CHAT, {"messages": media("audio_url", {"url": "https://x/y.mp3"})}, 3 + 30 * 25, 1),
    (E.CHAT, {"messages": media("audio_url", {"url": MINUTE_URL})}, 3 + 60 * 25, 1),
    (E.CHAT, {"messages": media("input_audio", {"data": MINUTE, "format": "mp3"})}, 3 + 1500, 1),
    (E.CHAT, {"messages": [CALLS, {"role": "tool", "tool_call_id": "x", "content": "42"}]}, 12, 2),
    (E.CHAT, {"messages": [user("")], "tools": TOOLS}, len(compact(TOOLS)), 1),
    (E.EMBEDDINGS, {"messages": [user("abc")]}, 3, 1),
    (E.EMBEDDINGS, {"input": [user("abc")]}, 3, 1),
    (E.RESPONSES, {"input": "abc"}, 3, 1),
    (E.RESPONSES, {"input": ITEMS, "instructions": "be brief"}, 14 + IMAGE_TOKENS + 8, 6),
    (E.MESSAGES, {"messages": MESSAGES, "system": "brief"}, OF_MESSAGES, 4),
    (E.MESSAGES, {"messages": MESSAGES, "system": [{"type": "text", "text": "brief"}]},
     OF_MESSAGES, 4),
]  # fmt: skip
OTHERS: list[tuple[Endpoint, dict[str, Any], int]] = [
    (E.EMBEDDINGS, {"input": [[user("abc")]] * 2}, 2 * (3 + FRAME)),
    (E.CHAT, {"messages": [[user("abc")]] * 2}, 2 * (3 + FRAME)),
    (E.SCORE, {"text_1": "abc", "text_2": "de"}, 5),
    (E.SCORE, {"text_1": "abc", "text_2": ["de", "f"]}, 2 * 3 + 3),
    (E.SCORE, {"text_1": ["abc"], "text_2": ["de", "f"]}, 2 * 3 + 3),
    (E.SCORE, {"text_1": ["abc", "x"], "text_2": ["de", "f"]}, 3 + 1 + 2 + 1),
    (E.SCORE, {"text_1": ["abc", "x"], "text_2": ["de"]}, 3 + 1 + 2),
    (E.SCORE, {"queries": "abc", "documents": ["de", "f"]}, 9),
    (E.SCORE, {"queries": "abc", "items": ["de", "f"]}, 9),
    (E.SCORE, {"data_1": "abc", "data_2": ["de", "f"]}, 9),
    (E.SCORE, {"queries": "abc", "documents": {"content": [{"image_url": DATA_URL}]}}, 103),
    (E.RERANK, {"query": "abc", "documents": ["d"] * 10}, 40),
    (E.EMBEDDINGS, {"input": ["x" * 100] * 2, "truncate_prompt_tokens": 30}, 60),
]


@pytest.mark.parametrize(
    ("endpoint", "fields", "tokens"),
    [*OTHERS, *((e, f, n + m * TOKENS_PER_MESSAGE + TOKENS_TO_REPLY) for e, f, n, m in PROMPTS)],
)
def test_prompt_tokens_are_those_of_content_and_template(
    endpoint: Endpoint, fields: dict[str, Any], tokens: int
) -> None:
    assert profile(endpoint, **fields).prompt_tokens == pytest.approx(tokens, rel=0.001)


@pytest.mark.parametrize(
    ("prompt", "tokens", "prompts"),
    [
        ("abcd", 4, 1),
        (["abcd", "ef"], 6, 2),
        ([101, 102, 103], 3, 1),
        ([[1, 2, 3], [4]], 4, 2),
        ("", 0, 1),
    ],
)
def test_prompts_may_be_texts_or_token_ids(prompt: Any, tokens: int, prompts: int) -> None:
    completion = profile(E.COMPLETIONS, prompt=prompt, n=3)
    assert (completion.prompt_tokens, completion.sequences) == (tokens, 3 * prompts)
    embedding = profile(E.EMBEDDINGS, input=prompt, n=3)
    assert (embedding.prompt_tokens, embedding.sequences) == (tokens, 0)


@pytest.mark.parametrize(
    ("fields", "density"),
    [({"prompt": []}, 1), ({"x": "text " * 500}, 1), ({"x": [[12, 34, 56]] * 900}, 0.3)],
)
@pytest.mark.parametrize("endpoint", [E.COMPLETIONS, E.POOLING, E.SCORE])
def test_body_with_unknown_fields_counts_by_its_length(
    endpoint: Endpoint, fields: dict[str, Any], density: float
) -> None:
    got = profile(endpoint, **fields)
    size = len(json.dumps({"model": "m", **fields}))
    assert got.prompt_tokens == pytest.approx(size * density, rel=0.3)
    assert got.prompt_bytes == 0


@pytest.mark.parametrize(
    ("endpoint", "field"), [(E.COMPLETIONS, "prompt_embeds"), (E.POOLING, "data")]
)
def test_base64_counts_by_length(endpoint: Endpoint, field: str) -> None:
    few, many = (
        profile(endpoint, **{field: "AAAA" * 2**18 * size}).prompt_tokens for size in (1, 4)
    )
    assert 0 < few < many < 10_000


ANY = 10_000_000  # tokens: the limit of all counts
ABSURD_IDS: list[Any] = [None, "", 5, [], "x" * 1_000]
BOUNDS: list[tuple[Endpoint, dict[str, Any], int | None]] = [
    (E.CHAT, {}, None), (E.CHAT, {"max_tokens": 5}, 5), (E.CHAT, {"max_output_tokens": 5}, None),
    (E.CHAT, {"max_tokens": 5, "max_completion_tokens": 7}, 7),
    (E.CHAT, {"max_tokens": 5, "max_completion_tokens": None}, 5),
    (E.CHAT, {"max_tokens": 300.0}, 300), (E.CHAT, {"max_tokens": 10**400}, ANY),
    (E.COMPLETIONS, {}, 16), (E.COMPLETIONS, {"max_tokens": None}, 16),
    (E.COMPLETIONS, {"max_tokens": 5}, 5), (E.COMPLETIONS, {"max_tokens": 0}, 16),
    (E.COMPLETIONS, {"max_tokens": 0, "echo": True}, 0),
    (E.COMPLETIONS, {"max_tokens": 5, "echo": True}, 5), (E.COMPLETIONS, {"echo": True}, 16),
    (E.RESPONSES, {"max_tokens": 5}, None), (E.RESPONSES, {"max_output_tokens": 5}, 5),
    (E.GENERATE, {"max_tokens": 5}, None), (E.GENERATE, {"sampling_params": {"max_tokens": 5}}, 5),
    (E.GENERATE, {"sampling_params": "x"}, None), (E.MESSAGES, {"max_tokens": 5}, 5),
    (E.EMBEDDINGS, {"max_tokens": 5}, 0), (E.SCORE, {}, 0), (E.RERANK, {}, 0),
]  # fmt: skip
FIELDS: list[tuple[str, Endpoint, dict[str, Any], object]] = [
    *(("output_bound", endpoint, fields, bound) for endpoint, fields, bound in BOUNDS),
    ("least_output", E.CHAT, {"min_tokens": 5}, 5),
    ("least_output", E.CHAT, {"min_tokens": 5, "max_tokens": 3}, 3),
    ("least_output", E.CHAT, {"ignore_eos": True, "max_tokens": 30}, 30),
    ("least_output", E.CHAT, {"ignore_eos": True}, ANY),
    ("least_output", E.CHAT, {"ignore_eos": False, "max_tokens": 30}, 0),
    ("least_output", E.GENERATE, {"sampling_params": {"ignore_eos": True}}, ANY),
    ("least_output", E.GENERATE, {"sampling_params": {"ignore_eos": True, "max_tokens": 7}}, 7),
    ("sequences", E.GENERATE, {"sampling_params": {"n": 3}}, 3),
    ("sequences", E.COMPLETIONS, {"max_tokens": 0, "echo": True}, 0),
    *(("stream", E.CHAT, {"stream": value}, True) for value in (True, "true", "yes", 1)),
    *(("stream", E.CHAT, {"stream": value}, False) for value in (False, "false", 0, "abc", None)),
    *(("stored", E.RESPONSES, fields, True) for fields in ({}, {"store": True})),
    *(("stored", E.RESPONSES, {"store": value}, False) for value in (False, None)),
    *(("stored", E.CHAT, fields, False) for fields in ({}, {"store": True})),
    *(
        ("fetches", E.CHAT, {"messages": media(kind, {"url": DATA_URL})}, kind != "text")
        for kind in ("text", "image_url", "audio_url", "video_url")
    ),
    ("in_background", E.RESPONSES, {"background": True}, True),
    ("in_background", E.RESPONSES, {"background": True, "stream": True}, False),
    ("in_background", E.CHAT, {"background": True}, False),
    ("previous_response", E.RESPONSES, {"previous_response_id": "resp_1"}, "resp_1"),
    ("previous_response", E.CHAT, {"previous_response_id": "resp_1"}, ""),
    *(("previous_response", E.RESPONSES, {"previous_response_id": id_}, "") for id_ in ABSURD_IDS),
]


@pytest.mark.parametrize(("name", "endpoint", "fields", "expected"), FIELDS)
def test_fields_are_read_as_vllm_reads_them(
    name: str, endpoint: Endpoint, fields: dict[str, Any], expected: object
) -> None:
    assert getattr(profile(endpoint, input="abc", **fields), name) == expected


@pytest.mark.parametrize(
    "absurd",
    [
        *("abc", "", "-1", "5.5", "1e1", "NaN", "9" * 5_000, [], {}, None),
        *(-1, 0, False, 1.5, 1e30, float("nan"), float("inf")),
    ],
)
def test_absurd_numbers_count_as_absent(absurd: Any) -> None:
    chat = profile(E.CHAT, max_completion_tokens=absurd, n=absurd)
    assert (chat.output_bound, chat.sequences) == (None, 1)
    completion = profile(E.COMPLETIONS, max_tokens=absurd, n=absurd)
    assert (completion.output_bound, completion.sequences) == (16, 1)


@pytest.mark.parametrize(
    ("given", "read"),
    [("12", 12), (" 12 ", 12), ("12.0", 12), ("+5", 5), (12.0, 12), (True, 1), ("1_000", 1000)],
)
def test_numbers_are_read_as_vllm_reads_them(given: Any, read: int) -> None:
    got = profile(E.CHAT, max_tokens=given, n=given)
    assert (got.output_bound, got.sequences) == (read, read)
    got = profile(E.COMPLETIONS, prompt=["a", "b"], max_tokens=given, n=given)
    assert (got.output_bound, got.sequences) == (read, 2 * read)
    got = profile(E.EMBEDDINGS, input="x" * 2_000, truncate_prompt_tokens=given)
    assert got.prompt_tokens == read


def test_reports_on_short_prompts_teach_the_ratio_of_the_text_alone() -> None:
    tokens = counter_of(bytes_per_token=4.0)
    content = "12345678" * 5
    body = json.dumps({"model": "m", "messages": [user(content)]})
    for _ in range(5_000):
        got = inspect(E.CHAT, body.encode(), tokens)
        tokens.learn("m", got.prompt_bytes, len(content) // 2 + FRAME)
    assert tokens.bytes_per_token("m") == pytest.approx(2.0, rel=0.05)
    assert got.prompt_tokens == pytest.approx(len(content) // 2 + FRAME, abs=1)


def test_prompts_that_are_not_only_text_teach_no_ratio() -> None:
    messages = media("image_url", {"url": "http://x/y.png"})
    assert profile(E.CHAT, messages=messages).prompt_bytes == 0
    assert profile(E.COMPLETIONS, prompt=[1, 2, 3]).prompt_bytes == 0
    assert profile(E.RERANK, query="a", documents=["b", "c"]).prompt_bytes == 0
    continued = profile(E.RESPONSES, input="abc", previous_response_id="resp_1")
    assert continued.prompt_bytes == 0  # the report includes earlier turns
    assert profile(E.RESPONSES, input="abc", previous_response_id=5).prompt_bytes > 0


CUT = json.dumps(
    {
        "model": "gpt",
        "max_tokens": 7,
        "messages": [
            user('é \U0001f600 "quoted" \\ text'),
            user("a\u00e9b") | {"name": "n", "x": [-1.5e-10, True, None]},
        ],
        "stream": True,
    },
    ensure_ascii=False,
).encode()


def test_body_cut_anywhere_is_measured() -> None:
    whole = inspect(E.CHAT, CUT, counter())
    for length in range(len(CUT) + 1):
        got = inspect(E.CHAT, CUT[:length], counter(), partial=True, content_length=len(CUT))
        assert got.model in ("", "gpt"), length
        assert got.prompt_bytes == 0, length
        assert whole.prompt_tokens <= got.prompt_tokens <= len(CUT), length


def test_missing_bytes_of_an_image_are_not_text() -> None:
    messages = [user([{"type": "image_url", "image_url": {"url": DATA_URL}}])]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    got = inspect(E.CHAT, body[:5_000], counter(), partial=True, content_length=len(body))
    assert got.prompt_tokens == IMAGE_TOKENS + FRAME
    assert (got.images, got.fetches) == (0, True)


@pytest.mark.parametrize(("length", "tokens"), [(10**15, 10_000_000), (-1, 0), (None, 0)])
def test_absurd_content_length_is_bounded(length: int | None, tokens: int) -> None:
    got = inspect(E.SCORE, b"", counter(), partial=True, content_length=length)
    assert got.prompt_tokens == tokens


def test_absurd_content_length_of_audio_counts_as_an_hour() -> None:
    got = inspect(E.TRANSCRIPTIONS, b"", counter(), partial=True, content_length=10**15)
    assert 3600 < got.prompt_tokens / 25 < 4500
    assert got.sequences == math.ceil(got.prompt_tokens / (30 * 25))


def test_beginning_that_is_no_json_is_refused() -> None:
    with pytest.raises(BadRequest):
        inspect(E.CHAT, b"model=m", counter(), partial=True)


@pytest.mark.parametrize(
    ("endpoint", "fields", "longest"),
    [
        (E.CHAT, {"messages": [user("x" * 91)], "n": 4}, 100),
        (E.COMPLETIONS, {"prompt": "x" * 100, "n": 4}, 100),
        (E.COMPLETIONS, {"prompt": ["x" * 80, "x" * 20], "n": 4}, 80),
        (E.COMPLETIONS, {"prompt": [[1] * 30, [1] * 10]}, 30),
        (E.EMBEDDINGS, {"input": ["x" * 10] * 9 + ["x" * 60]}, 60),
        (E.EMBEDDINGS, {"input": ["", ""]}, 0),
        (E.EMBEDDINGS, {"input": ["x" * 90, "x"], "truncate_prompt_tokens": 30}, 30),
        (E.CLASSIFY, {"input": ["x" * 10, "x" * 30]}, 30),
        (E.POOLING, {"input": "x" * 30}, 30),
        (E.SCORE, {"text_1": "xyz", "text_2": ["x" * 7, "x" * 17]}, 20),
        (E.SCORE, {"text_1": ["x" * 20, "x"], "text_2": ["x", "x" * 7]}, 21),
        (E.RERANK, {"query": "xyz", "documents": ["x" * 7, "x" * 17]}, 20),
    ],
)
def test_longest_prompt_is_that_of_the_longest_text(
    endpoint: Endpoint, fields: dict[str, Any], longest: float
) -> None:
    assert profile(endpoint, **fields).longest_prompt == pytest.approx(longest)


def test_prompt_and_output_share_the_context() -> None:
    bounded = profile(E.COMPLETIONS, prompt="x" * 60)
    assert bounded.most_output(100) == 16
    assert bounded.most_output(70) == 10
    assert bounded.most_output(50) == 1
    assert profile(E.COMPLETIONS, prompt="x" * 60, n=4).most_output(70) == 10
    unbounded = profile(E.CHAT, messages=[])
    assert unbounded.most_output(100) == 100 - TOKENS_TO_REPLY


AUDIO = bytes(range(256)) * 7_500  # two minutes of MP3 at 128 kbit/s


def form(**fields: str) -> bytes:
    parts = [f'; name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    file = b'; name="file"; filename="x.mp3"\r\nContent-Type: audio/mpeg\r\n\r\n' + AUDIO
    head = b"--b\r\nContent-Disposition: form-data"
    return b"".join(head + part + b"\r\n" for part in (*parts, file)) + b"--b--\r\n"


@pytest.mark.parametrize("endpoint", [E.TRANSCRIPTIONS, E.TRANSLATIONS])
def test_audio_form_is_measured_by_its_length(endpoint: Endpoint) -> None:
    got = inspect(endpoint, form(model="whisper", stream="true"), counter())
    assert (got.model, got.stream) == ("whisper", True)
    assert got.prompt_tokens == pytest.approx(120 * 25, rel=0.01)
    assert got.longest_prompt == pytest.approx(30 * 25, rel=0.3)
    assert got.sequences in (4, 5)
    assert (got.prompt_bytes, got.output_bound) == (0, None)


def test_audio_form_without_a_model_gets_the_default() -> None:
    got = inspect(E.TRANSCRIPTIONS, form(), counter(), model_of=lambda *_: "m")
    assert (got.model, got.stream) == ("m", False)


@pytest.mark.parametrize(
    "line", [b'name="model"', b'name="model"\r\n', b'name="model"\r\nx: y\r\n', b"\r\n"]
)
def test_any_audio_form_is_read_in_little_time(line: bytes) -> None:
    started = time.process_time()
    inspect(E.TRANSCRIPTIONS, line * (4_000_000 // len(line)), counter())
    assert time.process_time() - started < 0.1


def test_audio_form_without_its_body_is_measured_by_content_length() -> None:
    got = inspect(E.TRANSCRIPTIONS, b"", counter(), partial=True, content_length=1_920_000)
    assert got.prompt_tokens == 120 * 25
