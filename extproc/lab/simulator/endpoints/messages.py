"""``/v1/messages``, Anthropic's dialect."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from extproc.lab.simulator import tokens
from extproc.lab.simulator.endpoints.base import (
    Bound,
    GenerateBody,
    Output,
    Reply,
    Usage,
    event,
)
from extproc.lab.simulator.endpoints.openai import Message, encode_chat
from extproc.lab.simulator.steps import FinishReason

STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


class MessagesBody(GenerateBody):
    """The request."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: Bound
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def prompts(self) -> list[bytes]:
        """System text, tools and conversation, framed, and the head of the answer."""
        system = b""
        if self.system:
            system = tokens.encode_turn("system", tokens.encode_content(self.system))
        return [system + encode_chat(self.messages, self.tools)]


class MessagesReply(Reply):
    """The reply."""

    id_prefix = "msg_"

    def opening(self, sequences: int) -> bytes:
        message = self._message([], None, {"input_tokens": self.prompt_tokens, "output_tokens": 0})
        block = {"type": "text", "text": ""}
        return event({"type": "message_start", "message": message}) + event(
            {"type": "content_block_start", "index": 0, "content_block": block}
        )

    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        return (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":0,'
            b'"delta":{"type":"text_delta","text":"%b"}}\n\n'
        ) % text.encode()

    def closing(self, outputs: Sequence[Output], usage: Usage, include_usage: bool) -> bytes:
        delta = {"stop_reason": STOP_REASONS[outputs[0].reason], "stop_sequence": None}
        return (
            event({"type": "content_block_stop", "index": 0})
            + event({"type": "message_delta", "delta": delta, "usage": self._usage(usage)})
            + event({"type": "message_stop"})
        )

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        content = [{"type": "text", "text": outputs[0].text}]
        return self._message(content, STOP_REASONS[outputs[0].reason], self._usage(usage))

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> dict[str, int]:
        """Anthropic's input is what was not cached; without details vLLM takes all to be input."""
        if not self.prompt_tokens_details:
            return {"input_tokens": usage.prompt, "output_tokens": usage.completion}
        return {
            "input_tokens": usage.prompt - usage.cached,
            "output_tokens": usage.completion,
            "cache_read_input_tokens": usage.cached,
        }
