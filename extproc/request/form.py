"""Bodies that are forms with an audio file (``multipart/form-data``)."""

import re
from collections.abc import Callable
from dataclasses import replace

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
    model_of: Callable[[str, str], str],
) -> RequestProfile:
    """A transcription or translation; its length tells how long the audio is.

    Args:
        endpoint: what it asks for.
        body: as far as it came.
        length: bytes of the whole of it.
        tokens: as :func:`~extproc.request.large.of_length` takes them.
        model_of: as :func:`~extproc.request.inspect.inspect` takes it.
    """
    found = {name: value.decode(errors="replace") for name, value in _FIELD.findall(_ends(body))}
    asked = found.get(b"model", "")
    model = model_of(asked, "")
    profile = of_length(endpoint, length, model, tokens, flag(found.get(b"stream")))
    return replace(profile, asked=asked)


def model_in_form(body: bytes) -> tuple[int, int] | None:
    """Where in a form the name of its model begins and ends."""
    ends = _ends(body)
    spans = [field.span(2) for field in _FIELD.finditer(ends) if field[1] == b"model"]
    if not spans:
        return None
    first, last = spans[-1]
    left_out = len(body) - len(ends) if first >= _LOOKED_AT else 0
    return first + left_out, last + left_out


def _ends(body: bytes) -> bytes:
    return body[:_LOOKED_AT] + body[_LOOKED_AT:][-_LOOKED_AT:]
