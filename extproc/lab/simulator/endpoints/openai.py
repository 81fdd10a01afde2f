"""What OpenAI's chat and completions have in common."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, Field, model_validator

from extproc.lab.simulator.endpoints.base import GenerateBody, Output, Reply, Usage, compact
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
