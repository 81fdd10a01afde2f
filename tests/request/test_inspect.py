import json
import time
from typing import Any

import pytest

from extproc.config import RequestSettings
from extproc.request.endpoint import Endpoint, endpoint_of, stored_response_of
from extproc.request.errors import BadRequest, error_body
from extproc.request.inspect import inspect
from extproc.request.profile import RequestProfile
from extproc.request.prompt import TOKENS_PER_MESSAGE, TOKENS_TO_REPLY, VIDEO_TOKENS
from extproc.request.tokens import TokenCounter

IMAGE_TOKENS = 100
FRAME = TOKENS_PER_MESSAGE + TOKENS_TO_REPLY
MINUTE = "AAAA" * (60 * 16_000 // 3)  # a minute of MP3 at 128 kbit/s, in base64
MINUTE_URL = "data:audio/mp3;base64," + MINUTE
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
    @pytest.mark.parametrize("prefix", ["", "/batch", "/a/b/c/d", "/v1/models"])
    def test_is_named_by_the_end_of_the_path(self, prefix: str, endpoint: Endpoint) -> None:
        path = prefix + endpoint.value
        assert endpoint_of(path) is endpoint
        assert endpoint_of(f"{path}?api-version=1&x=/v1/models") is endpoint

    @pytest.mark.parametrize(
        ("path", "endpoint"),
        [
            ("/score", Endpoint.SCORE),
            ("/rerank", Endpoint.RERANK),
            ("/v2/rerank", Endpoint.RERANK),
            ("/v2/embed", Endpoint.EMBEDDINGS),
        ],
    )
    def test_has_other_paths_too(self, path: str, endpoint: Endpoint) -> None:
        assert endpoint_of(path) is endpoint

    @pytest.mark.parametrize(
        "path",
        [
            *("", "/", "?", "/v1/models", "/health", "/v1/score/", "/V1/Score", "/v1/highscore"),
            *("/v1/chat/completions/render", "/v1/messages/count_tokens", "/x?/v1/score"),
            *("/tokenize", "/detokenize", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel"),
        ],
    )
    def test_other_paths_carry_no_inference(self, path: str) -> None:
        assert endpoint_of(path) is None

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
    def test_a_path_may_name_a_stored_response(self, path: str, response: str) -> None:
        assert stored_response_of(path) == response


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
        ("part", "tokens"),
        [
            ({"type": "image_url", "image_url": {"url": DATA_URL}}, IMAGE_TOKENS),
            ({"image_url": DATA_URL}, IMAGE_TOKENS),
            ({"type": "video_url", "video_url": {"url": DATA_URL}}, VIDEO_TOKENS),
            ({"type": "audio_url", "audio_url": {"url": "https://x/y.mp3"}}, 30 * 25),
            ({"type": "audio_url", "audio_url": {"url": MINUTE_URL}}, 60 * 25),
            ({"type": "input_audio", "input_audio": {"data": MINUTE, "format": "mp3"}}, 60 * 25),
        ],
    )
    def test_counts_media(self, part: dict[str, Any], tokens: int) -> None:
        got = chat([{"type": "text", "text": "abc"}, part])
        assert got == pytest.approx(3 + tokens, rel=0.001)

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
        ],
    )
    def test_completions_and_embeddings(self, prompt: Any, tokens: int, prompts: int) -> None:
        completion = profile(Endpoint.COMPLETIONS, prompt=prompt, n=3)
        assert (completion.prompt_tokens, completion.sequences) == (tokens, 3 * prompts)
        embedding = profile(Endpoint.EMBEDDINGS, input=prompt, n=3)
        assert (embedding.prompt_tokens, embedding.sequences) == (tokens, 0)

    @pytest.mark.parametrize(
        ("fields", "density"),
        [
            ({"prompt": []}, 1),
            ({"other": "text " * 500}, 1),
            ({"other": [[12, 34, 56]] * 900}, 0.3),
        ],
    )
    @pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.POOLING, Endpoint.SCORE])
    def test_fields_unknown_here_count_by_the_length_of_the_body(
        self, endpoint: Endpoint, fields: dict[str, Any], density: float
    ) -> None:
        got = profile(endpoint, **fields)
        size = len(json.dumps({"model": "m", **fields}))
        assert got.prompt_tokens == pytest.approx(size * density, rel=0.3)
        assert got.prompt_bytes == 0

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
        assert (got.images, got.fetches) == (0, True)

    @pytest.mark.parametrize(("length", "tokens"), [(10**400, 10_000_000), (-1, 0), (None, 0)])
    def test_absurd_length_is_no_harm(self, length: int | None, tokens: int) -> None:
        got = inspect(Endpoint.SCORE, b"", counter(), partial=True, content_length=length)
        assert got.prompt_tokens == tokens

    def test_that_is_no_json_is_refused(self) -> None:
        with pytest.raises(BadRequest):
            inspect(Endpoint.CHAT, b"model=m", counter(), partial=True)


def test_error_body_is_openais() -> None:
    with pytest.raises(BadRequest) as caught:
        inspect(Endpoint.CHAT, b'{"model": 5}', counter())
    assert json.loads(error_body(caught.value)) == {
        "error": {
            "message": "the model must be a string",
            "type": "invalid_request_error",
            "param": "model",
            "code": "invalid_model",
        }
    }


class TestLongestPrompt:
    @pytest.mark.parametrize(
        ("endpoint", "fields", "longest"),
        [
            (Endpoint.CHAT, {"messages": [{"role": "user", "content": "x" * 91}], "n": 4}, 100),
            (Endpoint.COMPLETIONS, {"prompt": "x" * 100, "n": 4}, 100),
            (Endpoint.COMPLETIONS, {"prompt": ["x" * 80, "x" * 20], "n": 4}, 80),
            (Endpoint.COMPLETIONS, {"prompt": [[1] * 30, [1] * 10]}, 30),
            (Endpoint.EMBEDDINGS, {"input": ["x" * 10] * 9 + ["x" * 60]}, 60),
            (Endpoint.EMBEDDINGS, {"input": ["", ""]}, 0),
            (Endpoint.EMBEDDINGS, {"input": ["x" * 90, "x"], "truncate_prompt_tokens": 30}, 30),
            (Endpoint.CLASSIFY, {"input": ["x" * 10, "x" * 30]}, 30),
            (Endpoint.POOLING, {"input": "x" * 30}, 30),
            (Endpoint.SCORE, {"text_1": "xyz", "text_2": ["x" * 7, "x" * 17]}, 20),
            (Endpoint.SCORE, {"text_1": ["x" * 20, "x"], "text_2": ["x", "x" * 7]}, 21),
            (Endpoint.RERANK, {"query": "xyz", "documents": ["x" * 7, "x" * 17]}, 20),
        ],
    )
    def test_is_one_of_the_prompts(
        self, endpoint: Endpoint, fields: dict[str, Any], longest: float
    ) -> None:
        assert profile(endpoint, **fields).longest_prompt == pytest.approx(longest)

    def test_shares_the_context_with_the_output(self) -> None:
        bounded = profile(Endpoint.COMPLETIONS, prompt="x" * 60)
        assert bounded.most_output(100) == 16
        assert bounded.most_output(70) == 10
        assert bounded.most_output(50) == 1
        assert profile(Endpoint.COMPLETIONS, prompt="x" * 60, n=4).most_output(70) == 10
        unbounded = profile(Endpoint.CHAT, messages=[])
        assert unbounded.most_output(100) == 100 - TOKENS_TO_REPLY


class TestAudioForm:
    AUDIO = bytes(range(256)) * 7_500  # two minutes of MP3 at 128 kbit/s

    def form(self, **fields: str) -> bytes:
        parts = [f'; name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
        file = b'; name="file"; filename="x.mp3"\r\nContent-Type: audio/mpeg\r\n\r\n' + self.AUDIO
        head = b"--b\r\nContent-Disposition: form-data"
        return b"".join(head + part + b"\r\n" for part in (*parts, file)) + b"--b--\r\n"

    @pytest.mark.parametrize("endpoint", [Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS])
    def test_is_routed_on_its_length(self, endpoint: Endpoint) -> None:
        got = inspect(endpoint, self.form(model="whisper", stream="true"), counter())
        assert (got.model, got.stream) == ("whisper", True)
        assert got.prompt_tokens == pytest.approx(120 * 25, rel=0.01)
        assert got.longest_prompt == pytest.approx(30 * 25, rel=0.3)
        assert got.sequences in (4, 5)
        assert (got.prompt_bytes, got.output_bound) == (0, None)

    def test_may_name_no_model(self) -> None:
        got = inspect(Endpoint.TRANSCRIPTIONS, self.form(), counter(), model_of=lambda *_: "m")
        assert (got.model, got.stream) == ("m", False)

    @pytest.mark.parametrize(
        "line", [b'name="model"', b'name="model"\r\n', b'name="model"\r\nx: y\r\n', b"\r\n"]
    )
    def test_takes_little_time_whatever_it_is(self, line: bytes) -> None:
        started = time.process_time()
        inspect(Endpoint.TRANSCRIPTIONS, line * (4_000_000 // len(line)), counter())
        assert time.process_time() - started < 0.1

    def test_need_not_be_seen(self) -> None:
        got = inspect(
            Endpoint.TRANSCRIPTIONS, b"", counter(), partial=True, content_length=1_920_000
        )
        assert got.prompt_tokens == 120 * 25


class TestResponses:
    def test_go_on_from_one_that_a_replica_holds(self) -> None:
        got = profile(Endpoint.RESPONSES, input="abc", previous_response_id="resp_1")
        assert got.previous_response == "resp_1"
        assert got.prompt_bytes == 0  # the replica's count has what was said before, too
        assert profile(Endpoint.CHAT, previous_response_id="resp_1").previous_response == ""

    @pytest.mark.parametrize("absurd", [None, "", 5, [], "x" * 1_000])
    def test_absurd_ids_count_as_absent(self, absurd: Any) -> None:
        got = profile(Endpoint.RESPONSES, input="abc", previous_response_id=absurd)
        assert got.previous_response == ""
        assert got.prompt_bytes > 0

    @pytest.mark.parametrize(
        ("fields", "stored"),
        [({}, True), ({"store": True}, True), ({"store": False}, False), ({"store": None}, False)],
    )
    def test_are_stored_unless_that_is_not_wanted(
        self, fields: dict[str, Any], stored: bool
    ) -> None:
        assert profile(Endpoint.RESPONSES, input="abc", **fields).stored is stored
        assert profile(Endpoint.CHAT, **fields).stored is False

    def test_may_be_made_in_the_background(self) -> None:
        assert profile(Endpoint.RESPONSES, background=True).in_background
        assert not profile(Endpoint.RESPONSES, background=True, stream=True).in_background
        assert not profile(Endpoint.CHAT, background=True).in_background
