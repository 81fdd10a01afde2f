"""Prompts as the token ids that vLLM makes of them, where a model's chat template is known."""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic_core import to_json

from extproc.request.endpoint import Endpoint
from extproc.request.fields import flag
from extproc.request.prefix import MOST_BYTES, Ids, Prefix, prefix_of
from extproc.request.prompt import without_billing
from extproc.request.template import ChatTemplate
from extproc.request.tokenized import Tokenizations, Tokenized

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNUSUAL = (
    "add_special_tokens",
    "chat_template",
    "continue_final_message",
    "documents",
    "reasoning_effort",
)  # fields with which a chat is rendered in ways that are not known here
_MOST_SCHEMAS = 1_024  # objects in schemas of tools, which some templates print one by one
_TEXTS = frozenset({"text", "input_text", "output_text"})


class ExactPrompt(NamedTuple):
    """The token ids of a prompt that is sent as text."""

    ids: Ids
    tokens: int  # estimated where ``ids`` are only the first of them
    complete: bool = True
    asked: int = 0  # tokens of the prompt that the last answer in it was given to; 0: there is none
    answered: int = 0  # tokens up to the end of that answer

    def prefix(self, seed: int) -> Prefix:
        """What a prefix cache may hold of it, as far as it is known."""
        ids, begin, end = self.ids, self.asked, self.answered
        before, answer, after = ids[:begin], ids[begin:end], ids[end:]
        prefix = prefix_of(before.tobytes(), answer.tobytes(), after.tobytes(), len(ids), seed)
        return replace(prefix, ids=ids, whole=prefix.whole if self.complete else 0)


class _NotKnownError(Exception):
    """What vLLM would make of that."""


class ExactPrompts:
    """Makes them, by a model's tokenizer and chat template."""

    def __init__(self, tokenizer: "Tokenizer", template: ChatTemplate) -> None:
        self._template = template
        self._tokenizations = Tokenizations(tokenizer)
        self._before_texts = np.array(tokenizer.encode("").ids, np.uint32)

    def read(self, endpoint: Endpoint, fields: Mapping[str, object]) -> ExactPrompt | None:
        """The only prompt of a request; None: it is not known what vLLM would make of it."""
        try:
            if endpoint is Endpoint.CHAT:
                return self._read_chat(fields)
            if endpoint is Endpoint.COMPLETIONS:
                return self._read_prompt(fields)
        except _NotKnownError:
            pass
        return None

    def _read_prompt(self, fields: Mapping[str, object]) -> ExactPrompt:
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            [prompt] = prompt
        if not isinstance(prompt, str):
            raise _NotKnownError
        got = self._tokenize(prompt)
        if not flag(fields.get("add_special_tokens", True)):
            return ExactPrompt(*got)
        before = self._before_texts
        ids = np.concatenate([before, got.ids])
        return ExactPrompt(ids, got.tokens + len(before), got.complete)

    def _read_chat(self, fields: Mapping[str, object]) -> ExactPrompt:
        given = fields.get("chat_template_kwargs") or {}
        if not isinstance(given, dict) or any(map(fields.get, _UNUSUAL)):
            raise _NotKnownError
        options = {"tools": _tools(fields.get("tools")), "documents": None, **given}
        messages = self._messages(fields.get("messages"))
        text = self._text(messages, options, flag(fields.get("add_generation_prompt", True)))
        prompt = ExactPrompt(*self._tokenize(text))
        begin, end = _last_answer(messages)
        if not begin or not prompt.complete:
            return prompt
        asked = self._text(messages[:begin], options, generate=True)
        said = _shared(text, self._text(messages[:end], options, generate=False))
        first = self._tokenize(asked).ids
        if not text.startswith(asked) or not np.array_equal(prompt.ids[: len(first)], first):
            return prompt  # some templates print otherwise later what was said
        return prompt._replace(asked=len(first), answered=self._tokenize(said).tokens)

    def _text(self, messages: list[dict[str, Any]], options: dict[str, Any], generate: bool) -> str:
        given = {"messages": messages, "add_generation_prompt": generate}
        text = self._template.render(options | given)
        if not text:
            raise _NotKnownError
        return text

    def _tokenize(self, text: str) -> Tokenized:
        if len(text) > MOST_BYTES:
            raise _NotKnownError
        return self._tokenizations.of(text)

    def _messages(self, value: object) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not value:
            raise _NotKnownError
        return [_message(one, self._template.takes_parts) for one in value]


def _message(given: object, takes_parts: bool) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(role := given.get("role"), str):
        raise _NotKnownError
    if role == "developer":  # vLLM makes something else of it for most templates
        raise _NotKnownError
    texts = _texts(given.get("content"))
    if role == "system":
        texts = [text for text in map(without_billing, texts) if text]
    message: dict[str, Any] = {"role": role}
    if takes_parts and role != "tool":
        message["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        message["content"] = "\n".join(text for text in texts if text or takes_parts)
    if role == "assistant":
        if calls := given.get("tool_calls"):
            message["tool_calls"] = _calls(calls)
        if isinstance(reasoning := given.get("reasoning"), str):
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    for name in ("name", "tool_call_id"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    return message


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    return [_text(part) for part in (content if isinstance(content, list) else [content])]


def _text(part: object) -> str:
    if isinstance(part, dict) and part.get("type") in _TEXTS:
        part = part.get("text")
    if not isinstance(part, str):
        raise _NotKnownError
    return part


def _calls(given: object) -> list[dict[str, Any]]:
    """With their arguments as objects, as templates expect them."""
    if not isinstance(given, list):
        raise _NotKnownError
    calls = []
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _NotKnownError
        calls.append(call | {"function": function | {"arguments": _arguments(function)}})
    return calls


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    value = function.get("arguments")
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            value = None
    return value if isinstance(value, dict) else {}


def _tools(given: object) -> list[dict[str, Any]] | None:
    """As vLLM prints them: with all that a function may have, in its order."""
    if not given:
        return None
    if not isinstance(given, list) or to_json(given).count(b"{") > _MOST_SCHEMAS:
        raise _NotKnownError
    return [_tool(tool) for tool in given]


def _tool(given: object) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise _NotKnownError
    names = ("name", "description", "parameters")
    optional = {"strict": strict} if (strict := function.get("strict")) is not None else {}
    return {"type": "function", "function": {n: function.get(n) for n in names} | optional}


def _shared(one: str, other: str) -> str:
    """What both begin with; some templates print the head of an answer whether asked to or not."""
    if one.startswith(other):
        return other
    ends = range(1, min(len(one), len(other)) + 1)
    return one[: bisect_left(ends, True, key=lambda end: one[:end] != other[:end])]


def _last_answer(messages: list[dict[str, Any]]) -> tuple[int, int]:
    """Where the last messages of the assistant, one after another, begin and end."""
    roles = [message["role"] for message in messages]
    end = next((i for i in range(len(roles), 0, -1) if roles[i - 1] == "assistant"), 0)
    begin = next((i for i in range(end, 0, -1) if roles[i - 1] != "assistant"), 0)
    return begin, end
