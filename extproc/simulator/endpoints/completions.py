"""``/v1/completions``."""

from typing import Any

from pydantic import field_validator

from extproc.simulator.endpoints.base import Bound, Output, Prompts, encode_prompts
from extproc.simulator.endpoints.openai import OpenAIBody, OpenAIReply
from extproc.simulator.sequence import FinishReason

DEFAULT_MAX_TOKENS = 16
"""``max_tokens`` where it is absent or null."""


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
        """Each prompt."""
        return encode_prompts(self.prompt)

    @property
    def bound(self) -> int:
        """``max_tokens``."""
        return self.max_tokens


class CompletionReply(OpenAIReply):
    """The reply."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        """A chunk with the token."""
        finish = b'"%b"' % reason.encode() if reason else b"null"
        return (
            b'%b,"choices":[{"index":%d,"text":"%b","logprobs":null,"finish_reason":%b}]}\n\n'
        ) % (self._chunk_head, index, text.encode(), finish)

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        return {
            "index": index,
            "text": output.text,
            "logprobs": None,
            "finish_reason": output.reason,
            "stop_reason": None,
        }
