"""Requests that are not served, and the answers that clients get."""

from collections.abc import Sequence
from math import ceil

from pydantic_core import to_json

from extproc.request.endpoint import Endpoint

_MOST_NAMED = 50  # models in a message
_LONGEST_S = 3600.0  # of ``retry-after``


class Refusal(Exception):  # noqa: N818 - an answer, like the HTTP status it stands for
    """A request that the router answers itself.

    Args:
        message: for the client.
        param: the field of the body at fault, if any.
        code: a reason for programs to read, as OpenAI's API has them.
    """

    status = 500  # of the HTTP answer
    kind = "internal_error"  # ``type`` of the error in OpenAI's form
    anthropic_kind = "api_error"  # in Anthropic's
    retry_after = 0  # seconds after which the client may try again; 0: no header

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class BadRequest(Refusal):
    """A body that no replica could serve, whatever its model."""

    status = 400
    kind = anthropic_kind = "invalid_request_error"


class NoModel(Refusal):
    """A model that no replica serves."""

    status = 404
    kind = "invalid_request_error"
    anthropic_kind = "not_found_error"

    def __init__(self, model: str, known: Sequence[str]) -> None:
        named = ", ".join(f"`{name}`" for name in known[:_MOST_NAMED])
        more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
        message = f"The model `{model}` does not exist. There are: {named}{more}."
        super().__init__(message, "model", "model_not_found")


class NoReplica(Refusal):
    """No replica that may serve the request is ready."""

    status = 503
    kind = "service_unavailable_error"
    anthropic_kind = "overloaded_error"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        """``retry_after``: seconds; a second at least, an hour at most."""
        super().__init__(message)
        self.retry_after = ceil(min(max(retry_after, 1.0), _LONGEST_S))


class Saturated(Refusal):
    """Replicas so busy that the first token would come too late."""

    status = 429
    kind = anthropic_kind = "rate_limit_error"

    def __init__(self, message: str, code: str, retry_after: float) -> None:
        """``retry_after``: seconds; a second at least, an hour at most."""
        super().__init__(message, code=code)
        self.retry_after = ceil(min(max(retry_after, 1.0), _LONGEST_S))


def error_body(error: Refusal, endpoint: Endpoint | None = None) -> bytes:
    """The JSON body of the answer: in Anthropic's form where the endpoint is, else in OpenAI's."""
    if endpoint is Endpoint.MESSAGES:
        told = {"type": error.anthropic_kind, "message": error.message}
        return to_json({"type": "error", "error": told})
    return to_json(
        {
            "error": {
                "message": error.message,
                "type": error.kind,
                "param": error.param,
                "code": error.code,
            }
        }
    )
