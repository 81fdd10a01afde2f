"""What a client is told when no replica could serve its request."""

from pydantic_core import to_json


class BadRequest(Exception):  # noqa: N818 - the name of the HTTP status it stands for
    """A body that no replica could serve, whatever its model: answered with HTTP 400.

    Args:
        message: what is wrong, for the person who sent it.
        param: the field at fault, if it is one.
        code: machine-readable reason, as OpenAI's API uses it.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def error_body(error: BadRequest) -> bytes:
    """The JSON body of the 400 answer, in the form of OpenAI's API."""
    return to_json(
        {
            "error": {
                "message": error.message,
                "type": "invalid_request_error",
                "param": error.param,
                "code": error.code,
            }
        }
    )
