"""Keys of two prompts are equal exactly as far as the prompts are: texts, chats and token ids."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from extproc.request.endpoint import Endpoint
from extproc.request.inspect import inspect
from extproc.request.prefix import MOST_BYTES, UNIT_BYTES, Prefix, seed_of, token_keys
from extproc.request.profile import RequestProfile
from tests.request.conftest import assistant, counter_of, profiled, user

COUNTER = counter_of(bytes_per_token=4.0, image_tokens=576)


profile = partial(profiled, COUNTER)


def prefix(endpoint: Endpoint, **fields: Any) -> Prefix:
    return profile(endpoint, **fields).prefix


def chat(*messages: dict[str, Any], **fields: Any) -> Prefix:
    return prefix(Endpoint.CHAT, messages=messages, **fields)


def words(name: str, count: int) -> str:
    return "".join(f"{name} {number} " for number in range(count))


def shared(prefix: Prefix, other: Prefix) -> int:
    """Count the equal units at the beginning; all later units have to differ."""
    size = min(prefix.keys.size, other.keys.size)
    differ = np.flatnonzero(prefix.keys[:size] != other.keys[:size])
    equal = int(differ[0]) if differ.size else size
    assert not np.isin(prefix.keys[equal:], other.keys).any()
    return equal


SYSTEM = words("rule", 300)
TOOLS = [{"type": "function", "function": {"name": "get", "description": words("tool", 100)}}]
CALL = {"id": "x", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * 999}}
CHAT = [
    {"role": "system", "content": SYSTEM},
    user(words("é", 99)),
    assistant(words("answer", 500)),
    user([{"type": "text", "text": words("see", 50)}, IMAGE]),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "x", "content": words("result", 400)},
    assistant("done"),
    user("thanks"),
]
MESSAGES = [
    user(words("question", 99)),
    assistant([{"type": "tool_use", "id": "t", "name": "get", "input": {"a": words("b", 50)}}]),
    user([{"type": "tool_result", "tool_use_id": "t", "content": words("result", 200)}]),
    assistant(words("answer", 300)),
    user([{"type": "image", "source": {"type": "base64", "data": "iVBO" * 99}}]),
]
ITEMS = [
    user(words("question", 99)),
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": words("hm", 40)}]},
    {"type": "function_call", "call_id": "c", "name": "get", "arguments": words("a", 50)},
    {"type": "function_call", "call_id": "d", "name": "get", "arguments": words("b", 50)},
    {"type": "function_call_output", "call_id": "c", "output": words("result", 100)},
    {"type": "function_call_output", "call_id": "d", "output": words("result", 100)},
    assistant([{"type": "output_text", "text": words("answer", 300)}]),
    user([{"type": "input_image", "image_url": "https://x/y.png"}]),
]
Conversation = tuple[Callable[[int], Prefix], tuple[int, ...]]
CONVERSATIONS: dict[str, Conversation] = {
    "chat": (lambda turn: chat(*CHAT[:turn], tools=TOOLS), (2, 4, 6, 8)),
    "messages": (
        lambda turn: prefix(
            Endpoint.MESSAGES, messages=MESSAGES[:turn], system=SYSTEM, tools=TOOLS, max_tokens=9
        ),
        (1, 3, 5),
    ),
    "responses": (
        lambda turn: prefix(
            Endpoint.RESPONSES, input=ITEMS[:turn], instructions=SYSTEM, tools=TOOLS
        ),
        (1, 6, 8),
    ),
}


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_turn_continues_the_prompt_of_the_previous_turn(conversation: Conversation) -> None:
    prefix_of_turn, turn_ends = conversation
    turns = [prefix_of_turn(end) for end in turn_ends]
    assert (turns[0].previous_key, turns[0].previous_tokens) == (0, 0.0)
    for before, after in pairwise(turns):
        assert shared(before, after) == before.keys.size > 0
        assert after.previous_key == before.whole != after.whole
    assert len({turn.whole for turn in turns}) == len(turns)


def test_previous_tokens_end_where_the_next_question_begins() -> None:
    question, answer = words("q", 1_000), words("a", 500)
    got = profile(Endpoint.CHAT, messages=[user(question), assistant(answer), user("x" * 4_000)])
    share = (len(question) + len(answer)) / (len(question) + len(answer) + 4_000)
    assert got.prefix.previous_tokens == pytest.approx(share * got.prompt_tokens, rel=0.001)


def test_conversation_may_end_with_an_answer() -> None:
    got = profile(Endpoint.CHAT, messages=[user("why?"), assistant("Because")])
    assert got.prefix.previous_tokens == got.prompt_tokens
    assert got.prefix.previous_key == chat(user("why?")).whole


def test_unit_is_256_bytes_in_tokens_of_the_prompt() -> None:
    got = profile(Endpoint.CHAT, messages=CHAT, tools=TOOLS)
    hashed = got.prompt_tokens / got.prefix.unit * UNIT_BYTES
    assert got.prefix.keys.size == hashed // UNIT_BYTES
    assert got.prefix.unit == pytest.approx(64, rel=0.1)


def test_keys_differ_from_the_unit_of_the_first_difference() -> None:
    text = words("w", 2_000)
    for place in (0, 300, 5_000):
        other = text[:place] + "X" + text[place + 1 :]
        got = shared(chat(user(text)), chat(user(other)))
        assert got == pytest.approx(place // UNIT_BYTES, abs=1)


@pytest.mark.parametrize(
    "fields",
    [{"model": "adapter"}, {"cache_salt": "s"}, {"cache_salt": "t"}, {"tools": TOOLS}],
)
def test_model_salt_or_tools_change_all_keys(fields: Any) -> None:
    text = words("w", 2_000)
    other = chat(user(text), **fields)
    assert shared(chat(user(text)), other) == 0
    assert chat(user(text)).whole != other.whole


def test_tools_follow_the_system_prompt() -> None:
    messages = [{"role": "system", "content": SYSTEM}, user(words("w", 500))]
    got = shared(chat(*messages), chat(*messages, tools=TOOLS))
    assert got == pytest.approx(len(SYSTEM) // UNIT_BYTES, abs=1)
    got = shared(chat(*messages, tools=TOOLS), chat(messages[0], user("x" * 999), tools=TOOLS))
    assert got >= (len(SYSTEM) + len(str(TOOLS)) * 0.9) // UNIT_BYTES


@pytest.mark.parametrize(
    ("medium", "other"),
    [
        (IMAGE, {"type": "image_url", "image_url": {"url": "https://x/y.png"}}),
        *[
            ({"type": kind, kind: {"url": "https://x/1"}}, {"type": kind, kind: {"url": "x"}})
            for kind in ("video_url", "audio_url")
        ],
        (
            {"type": "image", "source": {"type": "base64", "data": "iVBO"}},
            {"type": "image", "source": {"type": "base64", "data": "jVBO"}},
        ),
    ],
)
def test_different_media_change_only_later_keys(medium: Any, other: Any) -> None:
    texts = [{"type": "text", "text": words(name, 500)} for name in ("before", "after")]
    got = [chat(user([texts[0], part, texts[1]])) for part in (medium, medium, other)]
    assert shared(got[0], got[1]) == got[0].keys.size == got[2].keys.size
    assert shared(got[0], got[2]) == len(texts[0]["text"]) // UNIT_BYTES
    assert got[0].whole == got[1].whole != got[2].whole


def test_role_and_message_borders_change_the_whole_key() -> None:
    assert chat(user("hi")).whole != chat(assistant("hi")).whole
    assert chat(user("hi"), user("you")).whole != chat(user("hi you")).whole


def test_length_alone_changes_the_whole_key() -> None:
    wholes = {chat(user("\0" * count)).whole for count in range(2 * UNIT_BYTES)}
    assert len(wholes) == 2 * UNIT_BYTES


def test_learned_image_tokens_do_not_change_keys() -> None:
    counter = counter_of(image_tokens=100)
    body = json.dumps({"model": "m", "messages": [user([IMAGE, "see"]), user("x" * 999)]}).encode()
    before = inspect(Endpoint.CHAT, body, counter).prefix
    for _ in range(99):
        counter.learn_images("m", 10, 10_000)
    after = inspect(Endpoint.CHAT, body, counter).prefix
    assert shared(before, after) == before.keys.size
    assert after.unit > before.unit


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.CHAT])
@pytest.mark.parametrize("in_parts", [False, True])
def test_billing_line_of_claude_code_is_ignored(endpoint: Endpoint, in_parts: bool) -> None:
    def got(header: str) -> RequestProfile:
        system: object = header + SYSTEM
        if in_parts:
            system = [{"type": "text", "text": text} for text in (header, SYSTEM)]
        if endpoint is Endpoint.MESSAGES:
            return profile(endpoint, messages=MESSAGES[:1], system=system)
        return profile(endpoint, messages=[{"role": "system", "content": system}, user("hi")])

    without = got("")
    for request in ("1", "2"):
        with_it = got(f"x-anthropic-billing-header: cch={request};\n")
        assert with_it.prefix.whole == without.prefix.whole
        assert with_it.prompt_tokens == without.prompt_tokens


def test_keys_of_a_text_completion_cover_its_whole_units() -> None:
    text = words("w", 500)
    got = prefix(Endpoint.COMPLETIONS, prompt=text)
    assert got.keys.size == len(text) // UNIT_BYTES
    assert got.whole == prefix(Endpoint.COMPLETIONS, prompt=[text]).whole
    longer = prefix(Endpoint.COMPLETIONS, prompt=text + "more")
    assert shared(got, longer) == got.keys.size


def test_keys_of_a_token_id_completion_cover_its_whole_units() -> None:
    ids = list(range(1_000))
    got = profile(Endpoint.COMPLETIONS, prompt=ids)
    assert got.prefix.unit == 64
    assert got.prefix.keys.size == 1_000 // 64
    changed = prefix(Endpoint.COMPLETIONS, prompt=[*ids[:200], 7, *ids[201:]])
    assert shared(got.prefix, changed) == 200 // 64
    assert got.prefix.whole == prefix(Endpoint.COMPLETIONS, prompt=[ids]).whole


@pytest.mark.parametrize("odd", [-1, 2**32, 1.5, "a", None, []])
def test_invalid_token_ids_have_no_keys(odd: Any) -> None:
    assert prefix(Endpoint.COMPLETIONS, prompt=[1, odd] * 500).keys.size == 0


TEXT = words("w", 500)


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (Endpoint.COMPLETIONS, {"prompt": [TEXT, TEXT]}),
        (Endpoint.COMPLETIONS, {"prompt": ""}),
        (Endpoint.CHAT, {"messages": []}),
        (Endpoint.CHAT, {"messages": [user(TEXT)], "truncate_prompt_tokens": 50}),
        (Endpoint.EMBEDDINGS, {"input": TEXT}),
        (Endpoint.SCORE, {"text_1": TEXT, "text_2": TEXT}),
        (Endpoint.RESPONSES, {"input": TEXT, "previous_response_id": "resp_1"}),
    ],
)
def test_request_without_a_single_known_prompt_has_no_keys(endpoint: Endpoint, fields: Any) -> None:
    got = prefix(endpoint, **fields)
    assert (got.keys.size, got.whole, got.previous_key) == (0, 0, 0)


def test_truncation_beyond_the_prompt_changes_nothing() -> None:
    assert chat(user(TEXT), truncate_prompt_tokens=9_999).whole == chat(user(TEXT)).whole


def test_cut_body_has_no_keys() -> None:
    body = json.dumps({"model": "m", "messages": [user(TEXT)], "tools": TOOLS}).encode()
    got = inspect(Endpoint.CHAT, body[:-500], COUNTER, partial=True, content_length=len(body))
    assert (got.prefix.keys.size, got.prefix.whole) == (0, 0)


VIDEOS = [{"type": "video_url", "video_url": f"https://x/{number}"} for number in range(9_000)]


@pytest.mark.parametrize("content", ["x" * (MOST_BYTES + 999), VIDEOS], ids=["text", "media"])
def test_prompt_beyond_the_limit_has_no_whole_key(content: Any) -> None:
    got = chat(user(content), assistant("yes"), user("well"))
    assert got.keys.size == MOST_BYTES // UNIT_BYTES
    assert (got.whole, got.previous_key) == (0, 0)


def test_keys_are_the_same_in_another_process() -> None:
    """Routers exchange keys, but each process has another seed for Python's hashes."""
    source = (
        "from tests.request.test_prefix import CHAT, TOOLS, chat; got = chat(*CHAT, tools=TOOLS); "
        "print(got.whole, got.previous_key, got.keys.tolist())"
    )
    seed = {"PYTHONHASHSEED": "4242"}
    printed = subprocess.check_output(
        [sys.executable, "-c", source], env=os.environ | seed, text=True
    )
    got = chat(*CHAT, tools=TOOLS)
    assert printed == f"{got.whole} {got.previous_key} {got.keys.tolist()}\n"


IDS = np.random.default_rng(1).integers(0, 150_000, 1_000).astype(np.uint32)
SEED = seed_of("")


def test_keys_of_a_part_continue_from_the_key_before() -> None:
    whole = token_keys(IDS, 16, SEED).tolist()
    assert len(whole) == len(set(whole)) == 62
    for cut in (1, 7, 61):
        first = token_keys(IDS[: cut * 16], 16, SEED).tolist()
        rest = token_keys(IDS[cut * 16 :].tolist(), 16, first[-1]).tolist()
        assert first + rest == whole


def test_key_depends_on_all_blocks_up_to_its_own() -> None:
    other = IDS.copy()
    other[100] += 1
    same = token_keys(IDS, 16, SEED) == token_keys(other, 16, SEED)
    assert same.tolist() == [True] * 6 + [False] * 56
    swapped = np.concatenate([IDS[16:32], IDS[:16], IDS[32:]])
    assert not (token_keys(IDS, 16, SEED) == token_keys(swapped, 16, SEED)).any()
