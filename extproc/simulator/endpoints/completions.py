"""``/v1/completions``."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from extproc.simulator.endpoints.base import (
    DONE,
    MAX_CHOICES,
    Bound,
    GenerateBody,
    Output,
    Prompts,
    Reply,
    StreamOptions,
    Usage,
    compact,
    data,
    encode_prompts,
)
from extproc.simulator.sequence import FinishReason


class CompletionBody(GenerateBody):
    """The request."""

    prompt: Prompts
    max_tokens: Bound | None = 16
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None

    @property
    def prompts(self) -> list[bytes]:
        """Each prompt."""
        return encode_prompts(self.prompt)

    @property
    def bound(self) -> int | None:
        """``max_tokens``; 16 where it is not given."""
        return self.max_tokens

    @property
    def choices(self) -> int:
        """``n``."""
        return self.n

    @property
    def include_usage(self) -> bool:
        """As the stream options say."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionReply(Reply):
    """The reply."""

    id_prefix = "cmpl-"

    def __init__(self, id_: str, model: str, created: int, prompt_tokens: int) -> None:
        super().__init__(id_, model, created, prompt_tokens)
        self._head = b"data: %b" % compact(self._frame())[:-1]

    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        """A chunk with the token."""
        return (
            b'%b,"choices":[{"index":%d,"text":"%b","logprobs":null,"finish_reason":%b}]}\n\n'
        ) % (self._head, index, text.encode(), b'"%b"' % reason.encode() if reason else b"null")

    def closing(self, outputs: Sequence[Output], usage: Usage, include_usage: bool) -> bytes:
        """The usage, if asked for, and the end."""
        if not include_usage:
            return DONE
        return data({**self._frame(), "choices": [], "usage": usage.openai()}) + DONE

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """All choices and the usage."""
        choices = [
            {
                "index": index,
                "text": output.text,
                "logprobs": None,
                "finish_reason": output.reason,
                "stop_reason": None,
            }
            for index, output in enumerate(outputs)
        ]
        return {**self._frame(), "choices": choices, "usage": usage.openai()}

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }
