"""What a client is told when its request is not served."""

from collections.abc import Sequence
from math import ceil

from pydantic_core import to_json

_MOST_NAMED = 50  # models in a message


class Refusal(Exception):  # noqa: N818 - an answer, like the HTTP status it stands for
    """A request that is answered here, and sent to no replica: the message, the field at fault if
    it is one, and a machine-readable reason, as OpenAI's API has them."""

    status = 500  # of the HTTP answer
    kind = "internal_error"  # ``type`` of the error in its body
    retry_after = 0  # seconds after which the client may try again; 0: it is not said

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class BadRequest(Refusal):
    """A body that no replica could serve, whatever its model."""

    status = 400
    kind = "invalid_request_error"


class NoModel(Refusal):
    """A model that no replica serves."""

    status = 404
    kind = "invalid_request_error"

    def __init__(self, model: str, known: Sequence[str]) -> None:
        named = ", ".join(f"`{name}`" for name in known[:_MOST_NAMED])
        more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
        message = f"The model `{model}` does not exist. There are: {named}{more}."
        super().__init__(message, "model", "model_not_found")


class NoReplica(Refusal):
    """None of the replicas that may serve it is ready."""

    status = 503
    kind = "service_unavailable_error"
    retry_after = 1


_LONGEST_S = 3600.0


class Saturated(Refusal):
    """Every replica is so busy that its first token would come too late."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, code: str, retry_after: float) -> None:
        """``retry_after``: seconds; a second at least, an hour at most."""
        super().__init__(message, code=code)
        self.retry_after = ceil(min(max(retry_after, 1.0), _LONGEST_S))


def error_body(error: Refusal) -> bytes:
    """The JSON body of the answer, in the form of OpenAI's API."""
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
