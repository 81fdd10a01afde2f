"""Prompts get exactly vLLM's token ids if the model's tokenizer and template are configured."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Encoding,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from extproc.request import tokenized
from extproc.request.endpoint import Endpoint
from extproc.request.inspect import inspect
from extproc.request.profile import RequestProfile
from extproc.request.tokens import TokenCounter
from tests.request.conftest import assistant, counter_of, profiled, user
from tests.request.test_bad_input import check_sane, fields

CHATML = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.reasoning or '') + message.content }}
{%- for call in message.tool_calls %}{{ call.function.name }}({{ call.function.arguments.a }})
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
{%- if enable_thinking %}<think>{% endif %}"""
IN_PARTS = """\
{%- for message in messages %}{{ bos_token }}
{%- if message.role == 'odd' %}{{ raise_exception('no such role') }}{% endif %}
{%- if message.content is string %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{% for part in message['content'] %}[{{ part.text }}]{% endfor %}{% endif %}
{%- endfor %}"""
TEXT = " ".join(f"number {number} of {number % 7} things, né?\n" for number in range(20_000))


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT[:9_999]], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    )
    return made


def sentence_piece() -> Tokenizer:
    """Return a tokenizer like that of Llama 2, which puts a space before a text."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        TEXT[:9_999].splitlines(), trainers.BpeTrainer(vocab_size=600, special_tokens=special)
    )
    made.post_processor = processors.TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", 0)]
    )
    return made


@pytest.fixture(scope="module", params=[byte_level, sentence_piece])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made: Tokenizer = request.param()
    made.add_special_tokens([AddedToken(f"<|im_{end}|>", special=True) for end in ("start", "end")])
    return made


Folder = Callable[..., TokenCounter]


@pytest.fixture
def counter(tokenizer: Tokenizer, tmp_path: Path) -> Folder:
    def made(template: str = CHATML, **config: object) -> TokenCounter:
        tokenizer.enable_truncation(10)  # which the router has to turn off
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        tokenizer.no_truncation()
        (tmp_path / "chat_template.jinja").write_text(template)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return counter_of(m=tmp_path)

    return made


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the texts that are tokenized."""
    texts: list[str] = []

    class RecordingTokenizer:
        def __init__(self, path: str) -> None:
            self.real = Tokenizer.from_file(path)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def encode(self, text: str, **options: Any) -> Encoding:
            texts.append(text)
            return self.real.encode(text, **options)

    monkeypatch.setattr("tokenizers.Tokenizer", SimpleNamespace(from_file=RecordingTokenizer))
    return texts


def known(tokens: TokenCounter, **given: Any) -> RequestProfile:
    """Return the profile of a prompt after enough requests to tokenize all of it."""
    for _ in range(20):
        got = profiled(tokens, Endpoint.CHAT, **given)
        if got.prefix.whole:
            return got
    raise AssertionError


def printed(text: str, tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def read(got: RequestProfile) -> list[int]:
    """Return the token ids of a prompt; check that a prompt sent as these ids has equal keys."""
    ids: list[int] = got.prefix.ids.tolist()
    sent = profiled(counter_of(), Endpoint.COMPLETIONS, prompt=ids)
    assert got.prefix.keys.tolist() == sent.prefix.keys.tolist()
    if got.prefix.whole:
        assert got.prefix.whole == sent.prefix.whole
        assert got.prompt_tokens == len(ids)
    return ids


def test_chat_has_the_token_ids_of_its_rendered_template(
    counter: Folder, tokenizer: Tokenizer
) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "x-anthropic-billing-header: cch=1\nbe brief"},
        user([{"type": "text", "text": "one"}, "", "two"]),
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": TEXT[:300]},
    ]
    tools = [{"type": "function", "function": {"name": "é", "parameters": {"a": {"b": []}}}}]
    options = {"enable_thinking": True}
    got = known(counter(), messages=messages, tools=tools, chat_template_kwargs=options)
    tool: dict[str, Any] = {"name": "é", "description": None, "parameters": {"a": {"b": []}}}
    text = (
        "<|im_start|>tools\n"
        + json.dumps({"type": "function", "function": tool}, ensure_ascii=False)
        + "\n<|im_end|>\n<|im_start|>system\nbe brief<|im_end|>\n"
        + "<|im_start|>user\none\ntwo<|im_end|>\n"
        + "<|im_start|>assistant\nhmget(1)<|im_end|>\n"
        + f"<|im_start|>tool\n{TEXT[:300]}<|im_end|>\n<|im_start|>assistant\n<think>"
    )
    assert read(got) == printed(text, tokenizer)
    assert got.prefix.unit == 64
    assert got.prompt_bytes == 0


def test_half_a_surrogate_pair_in_a_tool_call_counts_as_no_arguments(
    counter: Folder, tokenizer: Tokenizer
) -> None:
    call = {"function": {"name": "get", "arguments": r'{"a": "\ud83d"}'}}
    got = profiled(counter(), Endpoint.CHAT, messages=[{**assistant(""), "tool_calls": [call]}])
    text = "<|im_start|>assistant\nget()<|im_end|>\n<|im_start|>assistant\n"
    assert read(got) == printed(text, tokenizer)


def test_template_may_take_content_in_parts(counter: Folder, tokenizer: Tokenizer) -> None:
    tokens = counter(IN_PARTS, bos_token={"content": "<s>"})
    got = known(tokens, messages=[user(["a" * 99, {"type": "text", "text": "b"}]), user("c")])
    assert read(got) == printed(f"<s>[{'a' * 99}][b]<s>[c]", tokenizer)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ strftime_now('date: %%') }}", "date: %"),
        ("{{ ['é'] | tojson }}", '["é"]'),
        ("{{ ['é'] | tojson(true) }}", '["\\u00e9"]'),
        ("{{ ['é'] | tojson(false, 2) }}", '[\n  "é"\n]'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
    ],
)
def test_template_may_use_functions_of_transformers(
    counter: Folder, tokenizer: Tokenizer, template: str, text: str
) -> None:
    got = known(counter(template + "{{ messages[0].content }}"), messages=[user(TEXT[:500])])
    assert read(got) == printed(text + TEXT[:500], tokenizer)


def test_template_may_stand_in_tokenizer_config(
    counter: Folder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    counter(chat_template="{{ messages[0].content }}")
    (tmp_path / "chat_template.jinja").unlink()
    tokens = counter_of(m=tmp_path)
    assert read(known(tokens, messages=[user(TEXT[:500])])) == printed(TEXT[:500], tokenizer)


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [user([{"type": "image_url", "image_url": {"url": "http://x"}}])]},
        {"messages": [{"role": "developer", "content": TEXT[:999]}]},
        {"messages": [user(TEXT[:999])], "documents": [{"text": "x"}]},
        {"messages": [user(TEXT[:999])], "chat_template": "x"},
        {"messages": [user(TEXT[:999])], "continue_final_message": True},
        {"messages": [user(TEXT[:999])], "tools": [{"type": "web_search"}]},
        {"messages": [user(TEXT[:999])], "chat_template_kwargs": "x"},
        {"messages": [user("a")] * 4_000},
        {"messages": [user(TEXT[:999])], "chat_template_kwargs": {"tools": [0] * 9_000}},
        {
            "messages": [
                user(TEXT[:999]),
                {**assistant(""), "tool_calls": [{"function": {}}] * 5_000},
            ]
        },
        {"messages": [user(TEXT * 2)]},
        {
            "messages": [user("a")],
            "tools": [{"function": {"parameters": {str(number): {} for number in range(9_000)}}}],
        },
    ],
)
def test_chat_of_unknown_rendering_is_read_by_its_bytes(
    counter: Folder, given: dict[str, Any]
) -> None:
    got = profiled(counter(), Endpoint.CHAT, **given)
    assert got.prefix.keys.size
    assert not got.prefix.ids.size


def test_chat_of_more_than_a_megabyte_is_not_rendered(counter: Folder) -> None:
    """A template may join the system messages in time that grows with the square of their size."""
    tokens = counter("{{ messages[-1].content }}")
    got = profiled(tokens, Endpoint.CHAT, messages=[user(TEXT * 2), user(TEXT[:999])])
    assert not got.prefix.ids.size


def test_chat_rejected_by_its_template_is_read_by_its_bytes(counter: Folder) -> None:
    got = profiled(counter(IN_PARTS), Endpoint.CHAT, messages=[{"role": "odd", "content": "x"}])
    assert got.prefix.whole
    assert not got.prefix.ids.size


def test_cached_tokenisation_of_turns_is_that_of_the_whole_text(
    counter: Folder, tokenizer: Tokenizer
) -> None:
    tokens, messages, text, place = counter(), [], "", 0
    for size in (2_000, 700, 5_000, 1, 3_000, 0, 256):
        messages.append(user(TEXT[place : place + size]))
        text += f"<|im_start|>user\n{TEXT[place : place + size]}<|im_end|>\n"
        got = known(tokens, messages=messages)
        assert read(got) == printed(text + "<|im_start|>assistant\n", tokenizer)
        answer = TEXT[place : place + 200]
        messages.append(assistant(answer))
        text += f"<|im_start|>assistant\n{answer}<|im_end|>\n"
        place += size


def test_texts_that_diverge_within_a_word_are_tokenised_correctly(
    counter: Folder, tokenizer: Tokenizer
) -> None:
    tokens = counter("{{ messages[0].content }}")
    for place in range(500, 520):
        for end in ("", " things, né? " * 60, "thing" * 200, " " * 700):
            text = TEXT[:place] + end
            got = known(tokens, messages=[user(text)])
            assert read(got) == printed(text, tokenizer)


def test_earlier_turns_are_not_tokenised_again(counter: Folder, encoded: list[str]) -> None:
    tokens, messages = counter(), [user(TEXT[:30_000])]
    known(tokens, messages=messages)
    for turn in range(5):
        answer = assistant(f"{turn} it is")
        messages += [answer, user(TEXT[turn * 1_000 :][:1_000])]
        encoded.clear()
        assert profiled(tokens, Endpoint.CHAT, messages=messages).prefix.whole
        assert 0 < sum(map(len, encoded)) < 1_000 + 3 * 1_024


def test_long_prompt_is_tokenised_over_several_requests(
    counter: Folder, tokenizer: Tokenizer, encoded: list[str]
) -> None:
    tokens = counter()
    text = f"<|im_start|>user\n{TEXT[:50_000]}<|im_end|>\n<|im_start|>assistant\n"
    ids = printed(text, tokenizer)
    sizes = []
    for _ in range(5):
        encoded.clear()
        got = profiled(tokens, Endpoint.CHAT, messages=[user(TEXT[:50_000])])
        assert 0 < sum(map(len, encoded)) <= 16_384
        assert got.prompt_tokens == pytest.approx(len(ids), rel=0.1)
        assert got.prefix.tokens == got.prompt_tokens
        sizes.append(len(read(got)))
        assert read(got) == ids[: sizes[-1]]
        assert bool(got.prefix.whole) == (sizes[-1] == len(ids))
    assert sizes[0] > len(ids) / 4
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(ids)


def test_remembered_tokens_are_bounded(
    counter: Folder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenized, "_MOST_UNITS", 5)
    tokens = counter("{{ messages[0].content }}")
    for place in (0, 5_000, 0, 9_000):
        text = TEXT[place : place + 4_000]
        assert read(known(tokens, messages=[user(text)])) == printed(text, tokenizer)


def test_text_of_rare_characters_takes_neither_long_nor_much_memory(
    counter: Folder, encoded: list[str]
) -> None:
    tokens = counter("{{ messages[0].content }}")
    for _ in range(2):
        encoded.clear()
        profiled(tokens, Endpoint.CHAT, messages=[user("🐌" * 10_000)])
        assert "".join(encoded) == "🐌" * 4_096  # nothing was remembered


def test_completion_has_the_special_tokens_of_the_tokenizer(
    counter: Folder, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT[:500]).ids
    got = profiled(counter(), Endpoint.COMPLETIONS, prompt=TEXT[:500])
    assert read(got) == ids
    got = profiled(counter(), Endpoint.COMPLETIONS, prompt=[TEXT[:500]], add_special_tokens=False)
    assert read(got) == printed(TEXT[:500], tokenizer)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1, "a"], [-1], [1.5], [], None])
def test_completion_without_a_single_valid_prompt_has_no_keys(counter: Folder, prompt: Any) -> None:
    assert profiled(counter(), Endpoint.COMPLETIONS, prompt=prompt).prefix.keys.size == 0


def test_truncated_prompt_has_no_keys(counter: Folder) -> None:
    got = profiled(counter(), Endpoint.COMPLETIONS, prompt=TEXT[:5_000], truncate_prompt_tokens=50)
    assert (got.prompt_tokens, got.prefix.keys.size) == (50, 0)


def test_other_endpoints_are_read_by_their_bytes(counter: Folder) -> None:
    got = profiled(counter(), Endpoint.MESSAGES, messages=[user(TEXT[:5_000])])
    assert got.prefix.keys.size
    assert not got.prefix.ids.size


def test_cache_salt_changes_all_keys(counter: Folder) -> None:
    tokens = counter()
    plain = known(tokens, messages=[user(TEXT[:500])]).prefix
    salted = known(tokens, messages=[user(TEXT[:500])], cache_salt="s").prefix
    assert not np.isin(plain.keys, salted.keys).any()
    assert plain.whole != salted.whole


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TokenCounter:
    folder = tmp_path_factory.mktemp("model")
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return counter_of(m=folder)


@given(st.sampled_from([Endpoint.CHAT, Endpoint.COMPLETIONS]), fields)
def test_any_fields_are_measured_with_a_tokenizer(
    small: TokenCounter, endpoint: Endpoint, body: dict[str, Any]
) -> None:
    check_sane(inspect(endpoint, json.dumps(body | {"model": "m"}).encode(), small), endpoint)


def test_folder_without_a_template_is_an_error(counter: Folder, tmp_path: Path) -> None:
    counter()
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"'m' has no chat template.*neither .* nor"):
        counter_of(m=tmp_path)


def test_folder_with_a_broken_template_is_an_error(counter: Folder) -> None:
    with pytest.raises(ValueError, match=r"not a Jinja template.*to estimate its tokens"):
        counter("{% if %}")


@pytest.mark.parametrize("content", [None, "{}"])
def test_folder_without_a_tokenizer_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"'m' cannot be read.*r\.json: .*; give the folder"):
        counter_of(m=tmp_path)


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_missing_package_is_named(
    counter: Folder, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in ("extproc.request.exact", "extproc.request.template"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"'{package}'.*pip install 'extproc\[tokenizers\]'"
    with pytest.raises(ValueError, match=message):
        counter()
