"""``/v1/chat/completions``."""

import json
from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from extproc.simulator import tokens
from extproc.simulator.endpoints.base import (
    DONE,
    MAX_CHOICES,
    Bound,
    GenerateBody,
    Output,
    Reply,
    StreamOptions,
    Usage,
    compact,
    data,
)
from extproc.simulator.sequence import FinishReason


class Message(BaseModel):
    """A turn of a conversation."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatBody(GenerateBody):
    """The request."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: Bound | None = None
    max_tokens: Bound | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options and not self.stream:
            raise ValueError("Stream options can only be defined when `stream=True`.")
        return self

    @property
    def prompts(self) -> list[bytes]:
        """The conversation, framed, and the head of the answer."""
        return [encode_chat(self.messages, self.tools)]

    @property
    def bound(self) -> int | None:
        """``max_completion_tokens``, else ``max_tokens``."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def choices(self) -> int:
        """``n``."""
        return self.n

    @property
    def include_usage(self) -> bool:
        """As the stream options say."""
        return bool(self.stream_options and self.stream_options.include_usage)


def encode_chat(messages: list[Message], tools: list[dict[str, Any]] | None = None) -> bytes:
    """The tokens of a conversation to be continued by the assistant."""
    turns = [tokens.encode_turn("tools", tokens.encode(json.dumps(tools)))] if tools else []
    for message in messages:
        content = tokens.encode_content(message.content)
        if message.tool_calls:
            content += tokens.encode(json.dumps(message.tool_calls))
        turns.append(tokens.encode_turn(message.role, content))
    return b"".join(turns) + tokens.encode("<|assistant|>")


class ChatReply(Reply):
    """The reply."""

    id_prefix = "chatcmpl-"

    def __init__(self, id_: str, model: str, created: int, prompt_tokens: int) -> None:
        super().__init__(id_, model, created, prompt_tokens)
        self._head = b"data: %b" % compact(self._frame("chat.completion.chunk"))[:-1]

    def opening(self, sequences: int) -> bytes:
        """The role, for each sequence."""
        frame = self._frame("chat.completion.chunk")
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            data({**frame, "choices": [{"index": i, "delta": delta, "finish_reason": None}]})
            for i in range(sequences)
        )

    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        """A chunk with the token."""
        return (
            b'%b,"choices":[{"index":%d,"delta":{"content":"%b"},"logprobs":null,'
            b'"finish_reason":%b}]}\n\n'
        ) % (self._head, index, text.encode(), b'"%b"' % reason.encode() if reason else b"null")

    def closing(self, outputs: Sequence[Output], usage: Usage, include_usage: bool) -> bytes:
        """The usage, if asked for, and the end."""
        if not include_usage:
            return DONE
        frame = self._frame("chat.completion.chunk")
        return data({**frame, "choices": [], "usage": usage.openai()}) + DONE

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """All choices and the usage."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.text, "tool_calls": []},
                "logprobs": None,
                "finish_reason": output.reason,
                "stop_reason": None,
            }
            for index, output in enumerate(outputs)
        ]
        return {**self._frame("chat.completion"), "choices": choices, "usage": usage.openai()}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
