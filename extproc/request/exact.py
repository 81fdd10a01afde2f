"""Token ids of prompts, exactly as vLLM computes them, for models with a known chat template."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic_core import from_json

from extproc.request.endpoint import Endpoint
from extproc.request.fields import flag
from extproc.request.prefix import MOST_BYTES
from extproc.request.prompt import without_billing
from extproc.request.template import ChatTemplate
from extproc.request.tokenized import CachingTokenizer, TokenizedPrompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNUSUAL = (
    "add_special_tokens",
    "chat_template",
    "continue_final_message",
    "documents",
    "reasoning_effort",
)  # fields that make vLLM render a chat in ways that this module does not imitate
_MOST_VALUES = 8_192  # messages, tools and their fields
_TEXTS = frozenset({"text", "input_text", "output_text"})

T = TypeVar("T")


class _UnknownRenderingError(Exception):
    """This module cannot render the request as vLLM does."""


class ExactPrompts:
    """Tokenizes prompts by a model's tokenizer and chat template, exactly as vLLM does."""

    def __init__(self, tokenizer: "Tokenizer", template: ChatTemplate) -> None:
        self._template = template
        self._tokenizer = CachingTokenizer(tokenizer)
        self._special_ids = np.array(tokenizer.encode("").ids, np.uint32)

    def read(self, endpoint: Endpoint, fields: Mapping[str, object]) -> TokenizedPrompt | None:
        """Return the token ids of a request's prompt; None: several prompts, or ids unknown."""
        readers = {Endpoint.CHAT: self._read_chat, Endpoint.COMPLETIONS: self._read_prompt}
        try:
            return readers[endpoint](fields) if endpoint in readers else None
        except _UnknownRenderingError:
            return None

    def _read_prompt(self, fields: Mapping[str, object]) -> TokenizedPrompt:
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            [prompt] = prompt
        text = self._tokenize(_known(prompt, str))
        if not flag(fields.get("add_special_tokens", True)):
            return text
        ids = np.concatenate([self._special_ids, text.ids])
        return text._replace(ids=ids, tokens=text.tokens + len(self._special_ids))

    def _read_chat(self, fields: Mapping[str, object]) -> TokenizedPrompt:
        if any(map(fields.get, _UNUSUAL)):
            raise _UnknownRenderingError
        given = _known(fields.get("chat_template_kwargs") or {}, dict)
        options = {"tools": _tools(fields.get("tools")), "documents": None, **given}
        sent = _known(fields.get("messages") or None, list)
        messages = [_message(message, self._template.takes_parts) for message in sent]
        generate = flag(fields.get("add_generation_prompt", True))
        given = options | {"messages": messages, "add_generation_prompt": generate}
        if _takes_long(given):
            raise _UnknownRenderingError
        return self._tokenize(_known(self._template.render(given) or None, str))

    def _tokenize(self, text: str) -> TokenizedPrompt:
        if len(text) > MOST_BYTES:
            raise _UnknownRenderingError
        return self._tokenizer.tokenize(text)


def _known(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise _UnknownRenderingError
    return value


def _message(given: object, takes_parts: bool) -> dict[str, Any]:
    given = _known(given, dict)
    role = _known(given.get("role"), str)
    if role == "developer":  # vLLM replaces this role for most templates
        raise _UnknownRenderingError
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
            message["tool_calls"] = [_call(_known(call, dict)) for call in _known(calls, list)]
        if isinstance(reasoning := given.get("reasoning"), str):
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    names = [name for name in ("name", "tool_call_id") if isinstance(given.get(name), str)]
    return message | {name: given[name] for name in names}


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    bare = [
        part.get("text") if isinstance(part, dict) and part.get("type") in _TEXTS else part
        for part in (content if isinstance(content, list) else [content])
    ]
    return [_known(text, str) for text in bare]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates expect them."""
    function = _known(call.get("function"), dict)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments or "{}")  # refuses half a surrogate pair
        except ValueError:
            arguments = None
    arguments = arguments if isinstance(arguments, dict) else {}
    return call | {"function": function | {"arguments": arguments}}


def _tools(given: object) -> list[dict[str, Any]] | None:
    """Return tools as vLLM hands them to templates: with all fields of a function, in vLLM's
    order."""
    if not given:
        return None
    return [_tool(_known(tool, dict)) for tool in _known(given, list)]


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    function = _known(given.get("function"), dict)
    names = ("name", "description", "parameters")
    optional = {"strict": strict} if (strict := function.get("strict")) is not None else {}
    return {"type": "function", "function": {n: function.get(n) for n in names} | optional}


def _takes_long(value: object) -> bool:
    """Return True if a template may take long to print the value's parts, one by one or joined."""
    pending, characters = [value], 0
    for item in pending:
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
        if len(pending) > _MOST_VALUES or characters > MOST_BYTES:
            return True
    return False
