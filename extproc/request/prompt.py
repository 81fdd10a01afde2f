"""Prompts in a request body: the texts, token ids and media that a replica reads."""

from array import array
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple
from zlib import crc32

import numpy as np
from pydantic_core import to_json

from extproc.request.endpoint import Endpoint
from extproc.request.media import CLIP_TOKENS, audio_tokens
from extproc.request.prefix import MOST_BYTES, NO_PREFIX, Prefix, prefix_of
from extproc.request.tokens import TokenCounter, bytes_of

TOKENS_PER_MESSAGE = 5
"""Tokens that a chat template adds to a message: ``<|im_start|>``, role, newline,
``<|im_end|>``, newline in ChatML (Qwen); ``<|start_header_id|>``, role, ``<|end_header_id|>``,
blank line, ``<|eot_id|>`` in Llama 3."""

TOKENS_TO_REPLY = 4  # of the answer's header, with which a chat prompt ends in these templates

_IMAGES = frozenset({"image", "image_embeds", "image_pil", "image_url", "input_image"})
_AUDIO = frozenset({"audio_embeds", "audio_url", "input_audio"})
_VIDEO = frozenset({"video_embeds", "video_url"})
_MEDIA = _IMAGES | _AUDIO | _VIDEO

VIDEO_TOKENS = 32 * 256
"""Estimate for a video: vLLM samples 32 frames (``num_frames``). A frame has 256 tokens in
InternVL, 196 in LLaVA-OneVision, up to 384 in Qwen2-VL."""

_BYTES_PER_TOKEN = 4  # of a medium, in the bytes from which keys are made; token ids have 4, too
_IMAGE_TOKENS = 576  # of any image, in keys: a learned number would change the keys after the image

_SYSTEM, _USER, _ANSWER, _RESULT, _OTHER, _TOOLS = "\1", "\2", "\3", "\4", "\5", "\6"
"""Marks before a message, or before the tools, in the bytes from which keys are made."""
_ROLES = {
    "system": _SYSTEM,
    "developer": _SYSTEM,
    "user": _USER,
    "assistant": _ANSWER,
    "tool": _RESULT,
    "function": _RESULT,
}

_BILLING = "x-anthropic-billing-header"

_SCHEME_WITHIN = 16  # first characters, in which an address has ``://``; base64 never has it

_PRINTED = frozenset(
    {"text", "name", "arguments", "refusal", "thinking"}
    | {"content", "tool_calls", "function", "function_call", "output", "summary", "input"}
)  # fields of messages and their parts that are texts or contain further parts

_INPUTS = {
    Endpoint.COMPLETIONS: ("prompt",),
    Endpoint.GENERATE: ("token_ids",),
    Endpoint.EMBEDDINGS: ("input", "texts"),
    Endpoint.POOLING: ("input",),
    Endpoint.CLASSIFY: ("input",),
}  # fields with a text, token ids, or a list of texts or of token ids
_CHATS = {Endpoint.RESPONSES: ("input", "instructions")}
_PAIRS = (
    ("query", "documents"),
    ("query", "items"),
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)  # fields in which vLLM takes the two sides of a pair to score or rank


class Prompt:
    """Collects the pieces of a prompt in the order in which the model reads them; ignores pieces of
    a wrong type."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens = 0  # tokens that need no estimate: token ids, chat template
        self.images = 0
        self.media = 0  # tokens of audio and video, roughly estimated
        self._rendered: list[str] = []  # for keys: texts, marks of roles, digests of media
        self._answer = slice(0, 0)  # of ``_rendered``: the assistant's last consecutive messages
        self._media_left = MOST_BYTES  # bytes that further digests may take
        self._ids: list[int] = []

    def count(self, counter: TokenCounter, model: str) -> int:
        tokens = self.tokens + self.media + counter.count(model, self.texts)
        return tokens + self.images * counter.image_tokens(model) if self.images else tokens

    def prefix(self, tokens: int, seed: int) -> Prefix:
        if self._ids:
            try:
                ids = array("I", self._ids)
            except (TypeError, OverflowError):
                return NO_PREFIX
            prefix = prefix_of(ids.tobytes(), tokens, seed)
            return replace(prefix, ids=np.frombuffer(ids, np.uint32))
        pieces, answer = self._rendered, self._answer
        data = "".join(pieces).encode(errors="replace")
        before, answered = bytes_of(pieces[: answer.start]), bytes_of(pieces[answer])
        return prefix_of(data, tokens, seed, before, answered)

    def add_inputs(self, value: object) -> list[int]:
        """Add the input of completions or embeddings: a text, token ids, a conversation, or a list
        of these. Return the length of each prompt, in characters, token ids or messages."""
        several = isinstance(value, list) and value and isinstance(value[0], (str, list))
        prompts = value if isinstance(value, list) and several else [value]
        for prompt in prompts:
            if isinstance(prompt, str):
                self._add_text(prompt)
            elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
                self.add_chat(prompt)
            elif isinstance(prompt, list):
                self.tokens += len(prompt)
                self._ids = prompt
        return [len(prompt) if isinstance(prompt, (str, list)) else 0 for prompt in prompts]

    def add_chat(self, messages: object, system: object = None, tools: object = None) -> None:
        """Add a conversation in the order of most chat templates: system, tools, other messages.

        ``messages``: messages of OpenAI or Anthropic, items of the Responses API, or a text;
        ``system``: a system prompt in a field of its own.
        """
        if system:
            self._add_message({"role": "system", "content": system})
        if isinstance(messages, str):
            messages = [{"content": messages}]
        if isinstance(messages, list):
            self.tokens += TOKENS_TO_REPLY
        given = messages if isinstance(messages, list) else []
        messages = [message for message in given if isinstance(message, dict)]
        leading = list(takewhile(lambda message: _role(message) == _SYSTEM, messages))
        for message in leading:
            self._add_message(message)
        if tools:
            self._rendered.append(_TOOLS)
            self._add_text(_as_json(tools))
        for message in messages[len(leading) :]:
            self._add_message(message)

    def _add_message(self, message: dict[str, object]) -> None:
        """Add a message: content, tool calls or their results, and the template's tokens."""
        self.tokens += TOKENS_PER_MESSAGE
        start, role = len(self._rendered), _role(message)
        self._rendered.append(role)
        content = message.get("content")
        if isinstance(content, str) and len(message) == 2:  # role and content, as in most messages
            self._add_text(content)
        else:
            self.add_content(message)
        if role == _ANSWER:
            continues = start == self._answer.stop
            self._answer = slice(self._answer.start if continues else start, len(self._rendered))

    def _add_text(self, text: str) -> None:
        text = without_billing(text)
        self.texts.append(text)
        self._rendered.append(text)

    def add_content(self, value: object) -> None:
        """Add a text, a content part, or a list of these at any depth."""
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                self._add_text(item)
            elif isinstance(item, list):
                pending.extend(reversed(item))
            elif isinstance(item, dict):
                if kind := _medium(item):
                    self._add_medium(kind, item)
                else:
                    pending.extend(reversed(_printed(item)))

    def _add_medium(self, kind: str, part: dict[str, object]) -> None:
        source = _source(kind, part)
        identity = source or _as_json(part)
        if kind in _IMAGES:
            self.images += 1
            tokens = _IMAGE_TOKENS
        else:
            embedded = "://" not in source[:_SCHEME_WITHIN]  # base64, not an address
            audio = audio_tokens(len(source) * 3 // 4 if embedded else 0) or CLIP_TOKENS
            tokens = VIDEO_TOKENS if kind in _VIDEO else audio
            self.media += tokens
        if room := min(tokens * _BYTES_PER_TOKEN, self._media_left):
            self._media_left -= room
            digest = f"{crc32(identity.encode(errors='replace')):08x}"
            self._rendered.append(digest.ljust(room))


class Reading(NamedTuple):
    """Pieces of a request's prompts, and the length of each prompt."""

    pieces: list[tuple[Prompt, int]]  # piece, and how many times the replica reads it
    lengths: list[int]  # of the prompts, only to compare them: characters of text, or token ids

    @property
    def prompts(self) -> int:
        return len(self.lengths)

    @property
    def longest_share(self) -> float:
        """Length of the longest prompt ÷ sum of the lengths."""
        total = sum(self.lengths)
        return max(self.lengths) / total if total else 1 / self.prompts


def read(endpoint: Endpoint, fields: dict[str, object]) -> Reading:
    """Collect the prompts of a request; ignore fields of the wrong type."""
    if endpoint in (Endpoint.SCORE, Endpoint.RERANK):
        return _read_pairs(fields)
    messages, system = map(fields.get, _CHATS.get(endpoint, ("messages", "system")))
    given = next((fields[name] for name in _INPUTS.get(endpoint, ()) if name in fields), None)
    if isinstance(messages, list) and messages and isinstance(messages[0], list):  # a batch
        given, messages = messages, None
    prompt = Prompt()
    lengths = prompt.add_inputs(given)
    if endpoint not in (Endpoint.COMPLETIONS, Endpoint.GENERATE):
        prompt.add_chat(messages, system, fields.get("tools"))
    return Reading([(prompt, 1)], lengths)


def _read_pairs(fields: dict[str, object]) -> Reading:
    """Collect documents and queries: one query for all documents, or one query for each."""
    pairs_of = (pair for pair in _PAIRS if fields.keys() >= set(pair))
    queries, documents = map(fields.get, next(pairs_of, _PAIRS[0]))
    query, document = Prompt(), Prompt()
    query.add_content(queries)
    document.add_content(documents)
    left, right = _lengths(queries), _lengths(documents)
    times = 1 if len(left) > 1 else len(right)
    lengths = [sum(pair) for pair in zip(left * times, right, strict=False)]
    return Reading([(query, times), (document, 1)], lengths or [0])


def _lengths(values: object) -> list[int]:
    each = values if isinstance(values, list) else [values]
    return [len(value) if isinstance(value, str) else 0 for value in each]


def without_billing(text: str) -> str:
    """Remove, as vLLM does, a first line that Claude Code changes with each request. With this line
    no two prompts would have a common beginning."""
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _medium(part: dict[str, object]) -> str:
    """Return the kind of medium in a content part, or an empty string if it has no medium."""
    kind = part.get("type")
    if isinstance(kind, str):
        return kind if kind in _MEDIA else ""
    # vLLM accepts media parts without a type.
    return next((key for key in part if key in _MEDIA), "")


def _printed(part: dict[str, object]) -> list[object]:
    """Return the fields of a content part that templates print; the input of a tool is printed as
    JSON."""
    return [
        _as_json(value) if field == "input" else value
        for field, value in part.items()
        if field in _PRINTED and value
    ]


def _as_json(value: object) -> str:
    """Return a structure, such as a tool's schema, as the JSON text that chat templates print."""
    return to_json(value).decode()


def _role(message: dict[str, object]) -> str:
    """Return the mark of a message's role. Items of the Responses API without a role are classified
    by their type."""
    if isinstance(role := message.get("role"), str):
        return _ROLES.get(role, _OTHER)
    kind = message.get("type")
    kind = kind if isinstance(kind, str) else ""
    if kind == "reasoning" or kind.endswith("_call"):
        return _ANSWER
    return _RESULT if kind.endswith("_output") else _USER


def _source(kind: str, part: dict[str, object]) -> str:
    """Return the base64 data or the URL of a medium."""
    value = next((part[field] for field in (kind, "image_url", "source") if field in part), None)
    if isinstance(value, dict):
        value = value.get("data") or value.get("url")
    return value if isinstance(value, str) else ""
