"""``/v1/chat/completions``."""

import json
from typing import Any

from pydantic import BaseModel, Field

from extproc.lab.simulator import tokens
from extproc.lab.simulator.endpoints.base import Bound
from extproc.lab.simulator.endpoints.openai import OpenAIBody, OpenAIReply


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
