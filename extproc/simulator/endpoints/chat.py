"""``/v1/chat/completions``."""

import json
from typing import Any

from pydantic import BaseModel, Field

from extproc.simulator import tokens
from extproc.simulator.endpoints.base import Bound, Output
from extproc.simulator.endpoints.openai import OpenAIBody, OpenAIReply
from extproc.simulator.sequence import FinishReason


class Message(BaseModel):
    """A turn of a conversation."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatBody(OpenAIBody):
    """The request."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: Bound | None = None
    max_tokens: Bound | None = None

    @property
    def prompts(self) -> list[bytes]:
        """The conversation, framed, and the head of the answer."""
        return [encode_chat(self.messages, self.tools)]

    @property
    def bound(self) -> int | None:
        """``max_completion_tokens``, else ``max_tokens``."""
        return self.max_completion_tokens or self.max_tokens


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

    def opening(self, sequences: int) -> bytes:
        """The role, for each sequence."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk(choices=[{"index": index, "delta": delta, "finish_reason": None}])
            for index in range(sequences)
        )

    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        """A chunk with the token."""
        finish = b'"%b"' % reason.encode() if reason else b"null"
        return (
            b'%b,"choices":[{"index":%d,"delta":{"content":"%b"},"logprobs":null,'
            b'"finish_reason":%b}]}\n\n'
        ) % (self._chunk_head, index, text.encode(), finish)

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "tool_calls": []},
            "logprobs": None,
            "finish_reason": output.reason,
            "stop_reason": None,
        }
