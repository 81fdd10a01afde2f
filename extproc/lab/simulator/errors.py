"""What a client did wrong, answered as vLLM answers it."""

from http import HTTPStatus
from typing import Any

from pydantic import ValidationError


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
