"""Bodies too large to be read in the time that Envoy waits."""

from extproc.request.inspect import endpoint_of
from extproc.request.profile import RequestProfile
from extproc.request.tokens import TokenCounter

LARGE_BODY = 8 * 2**20
"""Bytes. Behind Envoy 1.40 a body of 8 MB reached the router after 30 ms, one of 40 MB after 240 to
380 ms; by default Envoy waits 200 ms."""

_MEDIUM = 2**20
"""Bytes: about one image."""


def of_length(path: str, length: int, model: str, tokens: TokenCounter) -> RequestProfile:
    """A request whose body is only known to be large: nobody writes that much, so it is media.

    Args:
        path: the request's path, one that ``endpoint_of`` knows.
        length: bytes of its body.
        model: what it is for.
        tokens: knows how many tokens an image is taken for.

    Raises:
        ValueError: the path carries no inference.
    """
    endpoint = endpoint_of(path)
    if endpoint is None:
        raise ValueError(f"{path!r} carries no inference")
    return RequestProfile(
        endpoint=endpoint,
        model=model,
        prompt_tokens=tokens.image_tokens * -(-length // _MEDIUM),
        prompt_bytes=0,
        output_bound=None if endpoint.decodes else 0,
        sequences=1 if endpoint.decodes else 0,
    )
