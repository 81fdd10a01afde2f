"""Refusals: errors with which the router itself answers requests."""

from collections.abc import Sequence
from math import ceil

from pydantic_core import to_json

from extproc.request.endpoint import Endpoint

_MOST_NAMED = 50  # models named in a message
_RETRIED = 429, 503  # statuses of refusals that tell the client when to try again
_LONGEST_S = 3600.0  # of ``retry-after``
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    404: ("invalid_request_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("service_unavailable_error", "overloaded_error"),  # Anthropic's own status is 529
}
"""Status → types of the error in the forms of OpenAI and Anthropic
(https://docs.claude.com/en/api/errors)."""


class Refusal(Exception):  # noqa: N818 - an answer to the client
    """Error with which the router answers a request.

    Args:
        message: text for the client.
        param: the field of the body that is wrong, if any.
        code: the reason, in a form for programs, as in OpenAI's API.
        retry_after: seconds for ``_RETRIED``, rounded up, at least 1 and at most 3600.
    """

    status: int  # of the HTTP answer
    retry_after = 0  # seconds; 0: no header

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        if self.status in _RETRIED:
            self.retry_after = ceil(min(max(retry_after, 1.0), _LONGEST_S))

    @property
    def reason(self) -> str:
        """Reason in metrics and records: the code or else the type of the error."""
        return self.code or _TYPES[self.status][0]


class BadRequest(Refusal):
    """The body is wrong for any model and replica."""

    status = 400


class NoModel(Refusal):
    """No replica serves the model."""

    status = 404

    def __init__(self, model: str, known: Sequence[str]) -> None:
        named = ", ".join(f"`{name}`" for name in known[:_MOST_NAMED])
        more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
        message = f"The model `{model}` does not exist. There are: {named}{more}."
        super().__init__(message, "model", "model_not_found")


class NoReplica(Refusal):
    """No replica can serve the request now."""

    status = 503


class Saturated(Refusal):
    """The replicas are so busy that the request would wait too long."""

    status = 429


def error_body(error: Refusal, endpoint: Endpoint | None = None) -> bytes:
    """Return the JSON body of the answer, in the form of Anthropic's or OpenAI's endpoints."""
    kind, anthropic_kind = _TYPES[error.status]
    if endpoint in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS):
        return to_json({"type": "error", "error": {"type": anthropic_kind, "message": str(error)}})
    described = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return to_json({"error": described})
