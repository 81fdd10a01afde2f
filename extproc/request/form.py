"""Bodies that are forms with an audio file (``multipart/form-data``)."""

import re
from collections.abc import Callable

from extproc.request.large import of_length
from extproc.request.lax import flag
from extproc.request.profile import Endpoint, RequestProfile
from extproc.request.tokens import TokenCounter

_LOOKED_AT = 16_384
"""Bytes at either end of a form in which its fields are looked for; between them is the file."""

_FIELD = re.compile(
    rb'name="(model|stream)"[^\r\n]{0,256}\r\n'  # and perhaps other headers of the part
    rb"(?:[^\r\n]{1,256}\r\n){0,4}\r\n([^\r\n]{1,512})\r\n"
)


def of_form(
    endpoint: Endpoint,
    body: bytes,
    length: int,
    tokens: TokenCounter,
    default_model: Callable[[], str],
) -> RequestProfile:
    """A transcription or translation; its length tells how long the audio is.

    Args:
        endpoint: what it asks for.
        body: as far as it came.
        length: bytes of the whole of it.
        tokens: as :func:`~extproc.request.large.of_length` takes them.
        default_model: asked where the form names no model.
    """
    ends = body[:_LOOKED_AT] + body[_LOOKED_AT:][-_LOOKED_AT:]
    found = {name: value.decode(errors="replace") for name, value in _FIELD.findall(ends)}
    model = found.get(b"model") or default_model()
    return of_length(endpoint, length, model, tokens, flag(found.get(b"stream")))
