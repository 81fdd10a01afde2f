"""``/v1/completions``."""

from typing import Any

from pydantic import field_validator

from extproc.lab.simulator.endpoints.base import Bound, Prompts, encode_prompts
from extproc.lab.simulator.endpoints.openai import OpenAIBody, OpenAIReply

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
