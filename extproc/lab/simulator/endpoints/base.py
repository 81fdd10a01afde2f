"""What the endpoints have in common: bodies, replies and errors."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, ValidationError

from extproc.lab.simulator import tokens
from extproc.lab.simulator.steps import FinishReason


class RequestError(Exception):
    """A request that is refused.

    The message says why; ``status`` is the HTTP status, ``param`` the field at fault.
    """

    def __init__(
        self, message: str, param: str | None = None, status: HTTPStatus = HTTPStatus.BAD_REQUEST
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def invalid(error: ValidationError) -> RequestError:
    """The first thing that is wrong with a body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return RequestError(f"{field}: {first['msg']}" if field else first["msg"], field or None)


def openai_error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The error body of OpenAI's endpoints."""
    return {"error": {"message": message, "type": _type(status), "param": param, "code": status}}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """The error body of Anthropic's endpoint."""
    return {"type": "error", "error": {"type": _type(status), "message": message}}


def _type(status: int) -> str:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "InternalServerError"
    return "NotFoundError" if status == HTTPStatus.NOT_FOUND else "BadRequestError"


TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Prompts = str | list[TokenId] | list[str] | list[list[TokenId]]
Bound = Annotated[int, Field(ge=1)]


class Body(BaseModel):
    """A request's body. Fields that change nothing here are accepted and ignored."""

    model: str | None = None
    priority: int = Field(default=0, ge=-(2**63), lt=2**63)


class GenerateBody(Body, ABC):
    """A request that generates text."""

    bounds: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """Fields that bound it; the first that is given counts."""

    stream: bool | None = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)

    @property
    @abstractmethod
    def prompts(self) -> list[bytes]:
        """The encoded prompts."""

    @property
    def bound(self) -> int | None:
        """Most tokens one sequence may generate; None: what the context leaves."""
        return next(filter(None, (getattr(self, name) for name in self.bounds)), None)

    @property
    def choices(self) -> int:
        """Sequences generated for each prompt."""
        return 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return True


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt: int
    completion: int
    cached: int  # prompt tokens taken from the prefix cache


@dataclass(frozen=True, slots=True)
class Output:
    """A generated sequence."""

    text: str
    tokens: int
    reason: FinishReason


@dataclass
class Reply(ABC):
    """Puts generated tokens into the words of one endpoint."""

    id_prefix: ClassVar[str]

    key: str  # what makes its id unique
    model: str
    created: int  # when, in seconds since 1970
    prompt_tokens: int
    prompt_tokens_details: bool
    """Whether the usage tells cached prompt tokens where vLLM makes that an option."""

    def __post_init__(self) -> None:
        self.id = self.id_prefix + self.key

    def prelude(self) -> bytes:
        return b""

    def opening(self, sequences: int) -> bytes:
        """What goes before the first token of a stream, and comes with it."""
        return b""

    @abstractmethod
    def token(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        """One token of sequence ``index``; with the reason if it is the last one."""

    @abstractmethod
    def closing(self, outputs: Sequence[Output], usage: Usage, include_usage: bool) -> bytes:
        """What a stream ends with."""

    @abstractmethod
    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The reply that is not streamed."""


def encode_prompts(prompts: Prompts) -> list[bytes]:
    """The encoded prompts of a string, a list of token ids, or a list of either."""
    if isinstance(prompts, str):
        return [tokens.encode(prompts)]
    if not prompts:
        raise RequestError("the prompt must not be empty", "prompt")
    if isinstance(prompts[0], int):
        return [_encode(prompts)]
    return [_encode(prompt) for prompt in prompts]


def _encode(prompt: Any) -> bytes:
    return tokens.encode(prompt) if isinstance(prompt, str) else tokens.encode_ids(prompt)


def compact(value: object) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event named after its type, as Responses and Messages send it."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), compact(value))
