"""OpenAI's chat, completions and audio endpoints."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from extproc.lab.simulator import tokens
from extproc.lab.simulator.endpoints.base import (
    Bound,
    GenerateBody,
    Output,
    Prompts,
    Reply,
    Usage,
    compact,
    encode_prompts,
)
from extproc.lab.simulator.steps import FinishReason

MAX_CHOICES = 128  # OpenAI's limit on `n`

DONE = b"data: [DONE]\n\n"


class StreamOptions(BaseModel):
    """``stream_options``."""

    include_usage: bool | None = False


class OpenAIBody(GenerateBody):
    """A request for one or several choices."""

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options and not self.stream:
            raise ValueError("Stream options can only be defined when `stream=True`.")
        return self

    @property
    def choices(self) -> int:
        return self.n

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class OpenAIReply(Reply):
    """A reply whose stream is of chunks alike."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]
    piece: ClassVar[bytes]  # what a chunk says of a token, as a format of its text

    def __post_init__(self) -> None:
        """Name it, and prepare what every chunk begins with."""
        super().__post_init__()
        self._chunk_head = b"data: %b" % compact(self._frame(self.chunk_object))[:-1]

    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        finish = b'"%b"' % reason.encode() if reason else b"null"
        said = self.piece % text.encode()
        return b'%b,"choices":[{"index":%d,%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (
            self._chunk_head,
            index,
            said,
            finish,
        )

    def closing(self, outputs: Sequence[Output], usage: Usage, include_usage: bool) -> bytes:
        return self._chunk(choices=[], usage=self._usage(usage)) + DONE if include_usage else DONE

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return {**self._frame(self.object), "choices": choices, "usage": self._usage(usage)}

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        reason = {"logprobs": None, "finish_reason": output.reason, "stop_reason": None}
        return {"index": index, **self._said(output.text), **reason}

    @abstractmethod
    def _said(self, text: str) -> dict[str, Any]: ...

    def _chunk(self, **fields: Any) -> bytes:
        return b"data: %b\n\n" % compact({**self._frame(self.chunk_object), **fields})

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        reported: dict[str, Any] = {
            "prompt_tokens": usage.prompt,
            "total_tokens": usage.prompt + usage.completion,
            "completion_tokens": usage.completion,
        }
        if self.prompt_tokens_details:
            reported["prompt_tokens_details"] = {"cached_tokens": usage.cached}
        return reported


class Message(BaseModel):
    """A turn of a conversation."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatBody(OpenAIBody):
    """The request."""

    bounds = ("max_completion_tokens", "max_tokens")
    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: Bound | None = None
    max_tokens: Bound | None = None

    @property
    def prompts(self) -> list[bytes]:
        return [encode_chat(self.messages, self.tools)]


def encode_chat(messages: list[Message], tools: list[dict[str, Any]] | None = None) -> bytes:
    """The tokens of a conversation to be continued by the assistant."""
    turns = [tokens.encode_turn("tools", tokens.encode(json.dumps(tools)))] if tools else []
    for message in messages:
        content = tokens.encode_content(message.content)
        if message.tool_calls:
            content += tokens.encode(json.dumps(message.tool_calls))
        turns.append(tokens.encode_turn(message.role, content))
    return b"".join(turns) + tokens.encode("<|assistant|>")


class ChatReply(OpenAIReply):
    """The reply."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    piece = b'"delta":{"content":"%b"}'

    def opening(self, sequences: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk(choices=[{"index": index, "delta": delta, "finish_reason": None}])
            for index in range(sequences)
        )

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "tool_calls": []}}


DEFAULT_MAX_TOKENS = 16  # `max_tokens` where it is absent or null


class CompletionBody(OpenAIBody):
    """The request."""

    prompt: Prompts
    max_tokens: Bound = DEFAULT_MAX_TOKENS

    @field_validator("max_tokens", mode="before")
    @classmethod
    def _null_is_the_default(cls, value: object) -> object:
        return DEFAULT_MAX_TOKENS if value is None else value

    @property
    def prompts(self) -> list[bytes]:
        return encode_prompts(self.prompt)


class CompletionReply(OpenAIReply):
    """The reply."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    piece = b'"text":"%b"'

    def _said(self, text: str) -> dict[str, Any]:
        return {"text": text}


_BYTES_PER_S = 16_000
_SAMPLED = 160  # every so-manieth byte is one of the prompt: 25 tokens a second
_CLIP_S = 30


class AudioBody(GenerateBody):
    """A file, taken for MP3 at 128 kbit/s."""

    bounds = ()
    file: bytes

    @property
    def prompts(self) -> list[bytes]:
        """A prompt for each clip of half a minute."""
        size = _CLIP_S * _BYTES_PER_S
        clips = [self.file[start : start + size] for start in range(0, len(self.file), size)]
        return [clip[::_SAMPLED] + bytes(-len(clip[::_SAMPLED]) % 4) for clip in clips]

    def reply(self, outputs: Sequence[Output]) -> dict[str, Any]:
        seconds = -(-len(self.file) // _BYTES_PER_S)
        text = "".join(output.text for output in outputs)
        return {"text": text, "usage": {"type": "duration", "seconds": seconds}}
