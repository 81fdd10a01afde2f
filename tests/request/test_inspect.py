import json
from typing import Any

import pytest

from extproc.config import RequestSettings
from extproc.request.errors import BadRequest, error_body
from extproc.request.inspect import endpoint_of, inspect
from extproc.request.profile import Endpoint, RequestProfile
from extproc.request.prompt import TOKENS_PER_MESSAGE, TOKENS_TO_REPLY
from extproc.request.tokens import TokenCounter

IMAGE_TOKENS = 100
FRAME = TOKENS_PER_MESSAGE + TOKENS_TO_REPLY
DATA_URL = "data:image/png;base64," + "iVBORw0K" * 10_000


def profile(endpoint: Endpoint, **fields: Any) -> RequestProfile:
    body = json.dumps({"model": "m", **fields}).encode()
    return inspect(endpoint, body, counter())


def counter() -> TokenCounter:
    """One token a byte: text is worth its length."""
    return TokenCounter(RequestSettings(bytes_per_token=1.0, image_tokens=IMAGE_TOKENS))


def chat(content: Any, **fields: Any) -> int:
    messages = [{"role": "user", "content": content}]
    return profile(Endpoint.CHAT, messages=messages, **fields).prompt_tokens - FRAME


class TestEndpoint:
    @pytest.mark.parametrize("endpoint", list(Endpoint))
    def test_is_named_by_the_path(self, endpoint: Endpoint) -> None:
        assert endpoint_of(endpoint.value) is endpoint
        assert endpoint_of(f"{endpoint.value}?api-version=1&x=/v1/score") is endpoint

    @pytest.mark.parametrize(
        "path",
        ["", "/", "?", "/v1/models", "/health", "/openai/v1/score", "/v1/score/", "/V1/score"],
    )
    def test_other_paths_carry_no_inference(self, path: str) -> None:
        assert endpoint_of(path) is None
        with pytest.raises(ValueError, match="carries no inference"):
            inspect(path, b'{"model": "m"}', counter())


class TestChatPrompt:
    def test_is_its_text_and_the_template_around_it(self) -> None:
        messages = [{"role": "system", "content": "12345"}, {"role": "user", "content": "123"}]
        got = profile(Endpoint.CHAT, messages=messages)
        assert got.prompt_tokens == 8 + 2 * TOKENS_PER_MESSAGE + TOKENS_TO_REPLY

    def test_counts_bytes_of_utf8_not_characters(self) -> None:
        assert chat("héllo 😀") == 11

    def test_has_content_in_parts(self) -> None:
        assert chat([{"type": "text", "text": "abc"}, {"type": "refusal", "refusal": "no"}]) == 5
        assert chat(["abc", {"text": "de"}]) == 5

    @pytest.mark.parametrize(
        ("part", "images"),
        [
            ({"type": "image_url", "image_url": {"url": DATA_URL}}, 1),
            ({"image_url": DATA_URL}, 1),
            ({"type": "input_audio", "input_audio": {"data": DATA_URL, "format": "wav"}}, 1),
            ({"type": "video_url", "video_url": {"url": DATA_URL}}, 16),
        ],
    )
    def test_counts_media_by_the_piece(self, part: dict[str, Any], images: int) -> None:
        assert chat([{"type": "text", "text": "abc"}, part]) == 3 + images * IMAGE_TOKENS

    def test_has_tool_calls_and_their_results(self) -> None:
        call = {"id": "x", "type": "function", "function": {"name": "get", "arguments": '{"a":1}'}}
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x", "content": "42"},
        ]
        got = profile(Endpoint.CHAT, messages=messages)
        assert got.prompt_tokens == 3 + 7 + 2 + 2 * TOKENS_PER_MESSAGE + TOKENS_TO_REPLY

    def test_has_the_schemas_of_tools(self) -> None:
        tools = [{"type": "function", "function": {"name": "get", "parameters": {"a": [1, 2]}}}]
        assert chat("", tools=tools) == len(json.dumps(tools, separators=(",", ":")))


class TestOtherPrompts:
    @pytest.mark.parametrize(
        ("prompt", "tokens", "prompts"),
        [
            ("abcd", 4, 1),
            (["abcd", "ef"], 6, 2),
            ([101, 102, 103], 3, 1),
            ([[1, 2, 3], [4]], 4, 2),
            ("", 0, 1),
            ([], 0, 1),
        ],
    )
    def test_completions_and_embeddings(self, prompt: Any, tokens: int, prompts: int) -> None:
        completion = profile(Endpoint.COMPLETIONS, prompt=prompt, n=3)
        assert (completion.prompt_tokens, completion.sequences) == (tokens, 3 * prompts)
        embedding = profile(Endpoint.EMBEDDINGS, input=prompt, n=3)
        assert (embedding.prompt_tokens, embedding.sequences) == (tokens, 0)

    def test_embeddings_of_conversations(self) -> None:
        messages = [{"role": "user", "content": "abc"}]
        assert profile(Endpoint.EMBEDDINGS, messages=messages).prompt_tokens == 3 + FRAME
        assert profile(Endpoint.EMBEDDINGS, input=messages).prompt_tokens == 3 + FRAME
        assert profile(Endpoint.EMBEDDINGS, input=[messages] * 2).prompt_tokens == 2 * (3 + FRAME)

    def test_responses(self) -> None:
        assert profile(Endpoint.RESPONSES, input="abc").prompt_tokens == 3 + FRAME
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "abc"}]},
            {"role": "user", "content": [{"type": "input_image", "image_url": DATA_URL}]},
            {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        ]
        got = profile(Endpoint.RESPONSES, input=items, instructions="be brief")
        text = 3 + IMAGE_TOKENS + 5 + 4 + 2 + 8
        assert got.prompt_tokens == text + 6 * TOKENS_PER_MESSAGE + TOKENS_TO_REPLY

    def test_messages(self) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": DATA_URL}
        result = [{"type": "text", "text": "42"}, {"type": "image", "source": source}]
        messages = [
            {"role": "user", "content": "abc"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s" * 99},
                    {"type": "tool_use", "id": "t", "name": "get", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": result}],
            },
        ]
        for system in ("brief", [{"type": "text", "text": "brief"}]):
            got = profile(Endpoint.MESSAGES, messages=messages, system=system, max_tokens=9)
            text = 3 + 2 + 3 + len('{"a":1}') + 2 + IMAGE_TOKENS + len("brief")
            assert got.prompt_tokens == text + 4 * TOKENS_PER_MESSAGE + TOKENS_TO_REPLY

    @pytest.mark.parametrize(
        ("fields", "tokens"),
        [
            ({"text_1": "abc", "text_2": "de"}, 5),
            ({"text_1": "abc", "text_2": ["de", "f"]}, 2 * 3 + 3),
            ({"text_1": ["abc"], "text_2": ["de", "f"]}, 2 * 3 + 3),
            ({"text_1": ["abc", "x"], "text_2": ["de", "f"]}, 3 + 1 + 2 + 1),
            ({"queries": "abc", "documents": ["de", "f"]}, 9),
            ({"queries": "abc", "items": ["de", "f"]}, 9),
            ({"data_1": "abc", "data_2": ["de", "f"]}, 9),
            ({"queries": "abc", "documents": {"content": [{"image_url": DATA_URL}]}}, 103),
        ],
    )
    def test_score_reads_the_query_with_every_document(
        self, fields: dict[str, Any], tokens: int
    ) -> None:
        assert profile(Endpoint.SCORE, **fields).prompt_tokens == tokens

    def test_rerank_reads_the_query_with_every_document(self) -> None:
        got = profile(Endpoint.RERANK, query="abc", documents=["d"] * 10)
        assert got.prompt_tokens == 40

    def test_truncation_bounds_every_prompt(self) -> None:
        inputs = ["x" * 100, "x" * 100]
        got = profile(Endpoint.EMBEDDINGS, input=inputs, truncate_prompt_tokens=30)
        assert (got.prompt_tokens, got.prompt_bytes) == (60, 0)


class TestOutputBound:
    @pytest.mark.parametrize(
        ("endpoint", "fields", "bound"),
        [
            (Endpoint.CHAT, {}, None),
            (Endpoint.CHAT, {"max_tokens": 5}, 5),
            (Endpoint.CHAT, {"max_tokens": 5, "max_completion_tokens": 7}, 7),
            (Endpoint.CHAT, {"max_tokens": 5, "max_completion_tokens": None}, 5),
            (Endpoint.CHAT, {"max_tokens": 300.0}, 300),
            (Endpoint.CHAT, {"max_tokens": 10**400}, 10_000_000),
            (Endpoint.CHAT, {"max_output_tokens": 5}, None),
            (Endpoint.COMPLETIONS, {}, 16),
            (Endpoint.COMPLETIONS, {"max_tokens": None}, 16),
            (Endpoint.COMPLETIONS, {"max_tokens": 5}, 5),
            (Endpoint.RESPONSES, {"max_tokens": 5}, None),
            (Endpoint.RESPONSES, {"max_output_tokens": 5}, 5),
            (Endpoint.MESSAGES, {"max_tokens": 5}, 5),
            (Endpoint.EMBEDDINGS, {"max_tokens": 5}, 0),
            (Endpoint.SCORE, {}, 0),
            (Endpoint.RERANK, {}, 0),
        ],
    )
    def test_follows_vllm(
        self, endpoint: Endpoint, fields: dict[str, Any], bound: int | None
    ) -> None:
        assert profile(endpoint, **fields).output_bound == bound

    @pytest.mark.parametrize(
        "absurd",
        [
            *("abc", "", "-1", "5.5", "1e1", "NaN", "9" * 5_000, [], {}, None),
            *(-1, 0, False, 1.5, 1e30, float("nan"), float("inf")),
        ],
    )
    def test_absurd_numbers_count_as_absent(self, absurd: Any) -> None:
        chat = profile(Endpoint.CHAT, max_completion_tokens=absurd, n=absurd)
        assert (chat.output_bound, chat.sequences) == (None, 1)
        completion = profile(Endpoint.COMPLETIONS, max_tokens=absurd, n=absurd)
        assert (completion.output_bound, completion.sequences) == (16, 1)

    @pytest.mark.parametrize(
        ("given", "read"),
        [("12", 12), (" 12 ", 12), ("12.0", 12), ("+5", 5), (12.0, 12), (True, 1), ("1_000", 1000)],
    )
    def test_numbers_are_read_as_vllm_reads_them(self, given: Any, read: int) -> None:
        got = profile(Endpoint.CHAT, max_tokens=given, n=given)
        assert (got.output_bound, got.sequences) == (read, read)
        got = profile(Endpoint.COMPLETIONS, prompt=["a", "b"], max_tokens=given, n=given)
        assert (got.output_bound, got.sequences) == (read, 2 * read)
        got = profile(Endpoint.EMBEDDINGS, input="x" * 2_000, truncate_prompt_tokens=given)
        assert got.prompt_tokens == read

    def test_sequences_have_a_limit(self) -> None:
        assert profile(Endpoint.CHAT, n=10**12).sequences == 100_000

    @pytest.mark.parametrize(
        ("stream", "expected"),
        [
            *[(True, True), ("true", True), ("yes", True), (1, True)],
            *[(False, False), ("false", False), (0, False), ("abc", False), (None, False)],
        ],
    )
    def test_stream(self, stream: Any, expected: bool) -> None:
        assert profile(Endpoint.CHAT, stream=stream).stream is expected


class TestPromptBytes:
    def test_teach_the_true_ratio(self) -> None:
        """Reports on short prompts, mostly template, lead to the ratio of the text alone."""
        tokens = TokenCounter(RequestSettings(bytes_per_token=4.0))
        content = "12345678" * 5
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]})
        for _ in range(5_000):
            got = inspect(Endpoint.CHAT, body.encode(), tokens)
            tokens.learn("m", got.prompt_bytes, len(content) // 2 + FRAME)
        assert tokens.bytes_per_token("m") == pytest.approx(2.0, rel=0.05)
        assert got.prompt_tokens == pytest.approx(len(content) // 2 + FRAME, abs=1)

    def test_are_left_out_where_the_report_says_nothing_of_text(self) -> None:
        image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
        messages = [{"role": "user", "content": ["abc", image]}]
        assert profile(Endpoint.CHAT, messages=messages).prompt_bytes == 0
        assert profile(Endpoint.COMPLETIONS, prompt=[1, 2, 3]).prompt_bytes == 0
        assert profile(Endpoint.RERANK, query="a", documents=["b", "c"]).prompt_bytes == 0


class TestPartialBody:
    body = json.dumps(
        {
            "model": "m",
            "max_tokens": 7,
            "messages": [
                {"role": "user", "content": 'é \U0001f600 "quoted" \\ text'},
                {"role": "user", "content": "a\u00e9b", "name": "n", "x": [-1.5e-10, True, None]},
            ],
            "stream": True,
        },
        ensure_ascii=False,
    ).encode()

    @pytest.mark.parametrize("length", range(len(body) + 1))
    def test_may_break_off_anywhere(self, length: int) -> None:
        got = inspect(
            Endpoint.CHAT,
            self.body[:length],
            counter(),
            partial=True,
            content_length=len(self.body),
        )
        whole = inspect(Endpoint.CHAT, self.body, counter())
        assert got.model in ("", "m")
        assert got.prompt_bytes == 0
        assert whole.prompt_tokens <= got.prompt_tokens <= len(self.body)

    def test_model_cut_short_is_no_model(self) -> None:
        got = inspect(Endpoint.CHAT, b'{"stream": true, "model": "gpt', counter(), partial=True)
        assert got.model == ""

    def test_missing_bytes_of_an_image_are_not_text(self) -> None:
        image = {"type": "image_url", "image_url": {"url": DATA_URL}}
        messages = [{"role": "user", "content": [image]}]
        body = json.dumps({"model": "m", "messages": messages}).encode()
        got = inspect(
            Endpoint.CHAT, body[:5_000], counter(), partial=True, content_length=len(body)
        )
        assert got.prompt_tokens == IMAGE_TOKENS + FRAME

    @pytest.mark.parametrize(("length", "tokens"), [(10**400, 10_000_000), (-1, 0), (None, 0)])
    def test_absurd_length_is_no_harm(self, length: int | None, tokens: int) -> None:
        got = inspect(Endpoint.SCORE, b"", counter(), partial=True, content_length=length)
        assert got.prompt_tokens == tokens

    def test_that_is_no_json_is_refused(self) -> None:
        with pytest.raises(BadRequest):
            inspect(Endpoint.CHAT, b"model=m", counter(), partial=True)


def test_error_body_is_openais() -> None:
    with pytest.raises(BadRequest) as caught:
        inspect(Endpoint.CHAT, b"{}", counter())
    assert json.loads(error_body(caught.value)) == {
        "error": {
            "message": "the request names no model",
            "type": "invalid_request_error",
            "param": "model",
            "code": "missing_model",
        }
    }
