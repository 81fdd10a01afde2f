"""Bodies of requests for generated text: their fields, prompts and errors."""

import json
from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator

from extproc.lab.simulator import tokens

MAX_CHOICES = 128  # OpenAI's limit on `n`

_BYTES_PER_S = 16_000  # MP3 at 128 kbit/s
_SAMPLED = 160  # every 160th byte of a file is a byte of the prompt: 25 tokens a second
_CLIP_BYTES = 30 * _BYTES_PER_S


class RequestError(Exception):
    """Refuses a request; ``param`` names the field at fault."""

    def __init__(
        self, message: str, param: str | None = None, status: HTTPStatus = HTTPStatus.BAD_REQUEST
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def invalid(error: ValidationError) -> RequestError:
    """Return the error for the first invalid field of a body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return RequestError(f"{field}: {first['msg']}" if field else first["msg"], field or None)


TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Prompts = str | list[TokenId] | list[str] | list[list[TokenId]]
Bound = Annotated[int, Field(ge=1)]
Tools = list[dict[str, Any]] | None


class Body(BaseModel):
    """Body of a request; unknown fields are ignored."""

    model: str | None = None
    priority: int = Field(default=0, ge=-(2**63), lt=2**63)


class GenerateBody(Body, ABC):
    """Body of a request that generates text."""

    bounds: ClassVar[tuple[str, ...]] = ("max_tokens",)  # field names; the first one given counts
    default_bound: ClassVar[int | None] = None

    stream: bool | None = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)

    @abstractmethod
    def prompts(self) -> list[bytes]: ...

    @property
    def bound(self) -> int | None:
        """Most tokens that a sequence may generate; None: up to the end of the context."""
        return next(filter(None, (getattr(self, name) for name in self.bounds)), self.default_bound)

    @property
    def choices(self) -> int:
        return 1

    @property
    def include_usage(self) -> bool:
        """True if the request wants the usage at the end of a stream."""
        return True


class OpenAIBody(GenerateBody):
    """Body of an OpenAI request, which may ask for several choices (``n``)."""

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream_options: dict[str, bool | None] | None = None

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
        return bool((self.stream_options or {}).get("include_usage"))


class Message(BaseModel):
    """Turn of a conversation."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: Tools = None

    def encoded(self) -> bytes:
        calls = tokens.encode(json.dumps(self.tool_calls)) if self.tool_calls else b""
        return tokens.encode_content(self.content) + calls


class ChatBody(OpenAIBody):
    """Body of ``/v1/chat/completions``."""

    bounds = ("max_completion_tokens", "max_tokens")
    messages: list[Message] = Field(min_length=1)
    tools: Tools = None
    max_completion_tokens: Bound | None = None
    max_tokens: Bound | None = None

    def prompts(self) -> list[bytes]:
        return [encode_chat(self.messages, self.tools)]


class CompletionBody(OpenAIBody):
    """Body of ``/v1/completions``."""

    default_bound = 16
    prompt: Prompts
    max_tokens: Bound | None = None

    def prompts(self) -> list[bytes]:
        return encode_prompts(self.prompt)


class MessagesBody(GenerateBody):
    """Body of ``/v1/messages``."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: Bound
    system: str | list[dict[str, Any]] | None = None
    tools: Tools = None

    def prompts(self) -> list[bytes]:
        return [_system(self.system) + encode_chat(self.messages, self.tools)]


class ResponsesBody(GenerateBody):
    """Body of ``/v1/responses``."""

    bounds = ("max_output_tokens",)
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: Tools = None
    max_output_tokens: Bound | None = None
    store: bool | None = True
    background: bool | None = False
    previous_response_id: str | None = None
    _earlier: bytes = PrivateAttr(b"")

    def begin_with(self, conversation: bytes) -> None:
        """Put an encoded conversation before the input."""
        self._earlier = conversation

    def prompts(self) -> list[bytes]:
        if not self.input:
            raise RequestError("the input must not be empty", "input")
        items = [{"content": self.input}] if isinstance(self.input, str) else self.input
        turns = [
            (str(item.get("role", "user")), tokens.encode_content(item.get("content", item)))
            for item in items
        ]
        return [self._earlier + _system(self.instructions) + _encode_turns(turns, self.tools)]


class TokenizeBody(Body):
    """Body of ``/tokenize``: a text or a conversation."""

    prompt: str | None = None
    messages: list[Message] | None = None

    @property
    def encoded(self) -> bytes:
        if self.messages is not None:
            return encode_chat(self.messages)
        if self.prompt is None:
            raise RequestError("either prompt or messages is needed", "prompt")
        return tokens.encode(self.prompt)


class AudioBody(GenerateBody):
    """Audio file, assumed to be MP3 at 128 kbit/s."""

    bounds = ()
    file: bytes

    def prompts(self) -> list[bytes]:
        """Return a prompt for each half minute of the file."""
        starts = range(0, len(self.file), _CLIP_BYTES)
        clips = [self.file[start : start + _CLIP_BYTES][::_SAMPLED] for start in starts]
        return [clip + bytes(-len(clip) % 4) for clip in clips]

    @property
    def seconds(self) -> int:
        return -(-len(self.file) // _BYTES_PER_S)


def encode_chat(messages: list[Message], tools: Tools = None) -> bytes:
    """Encode a conversation, up to the point at which the assistant answers."""
    return _encode_turns([(message.role, message.encoded()) for message in messages], tools)


def _encode_turns(turns: list[tuple[str, bytes]], tools: Tools) -> bytes:
    if tools:
        turns = [("tools", tokens.encode(json.dumps(tools))), *turns]
    return b"".join(tokens.encode_turn(*turn) for turn in turns) + tokens.encode("<|assistant|>")


def _system(text: str | list[dict[str, Any]] | None) -> bytes:
    return tokens.encode_turn("system", tokens.encode_content(text)) if text else b""


def encode_prompts(prompts: Prompts) -> list[bytes]:
    """Encode one prompt (a string, or a list of token ids) or a list of prompts."""
    if not prompts:
        raise RequestError("the prompt must not be empty", "prompt")
    single = isinstance(prompts, str) or isinstance(prompts[0], int)
    several: list[Any] = [prompts] if single else [*prompts]
    return [
        tokens.encode(prompt) if isinstance(prompt, str) else tokens.encode_ids(prompt)
        for prompt in several
    ]
