"""Changes to a request's body: the model's name, and vLLM's priority."""

import re
from contextlib import suppress
from itertools import islice

import msgspec
from pydantic_core import to_json

from extproc.request.body import decode, readable
from extproc.request.endpoint import Endpoint
from extproc.request.errors import BadRequest
from extproc.request.media import model_in_form

_NAMED = re.compile(rb'"model"\s*:\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")')  # possessive: takes no memory
_TRIES = 4
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def rename(endpoint: Endpoint, body: bytes, name: str) -> bytes:
    """Replace the model's name in ``body``; all other values keep their bytes. A body without a
    model, or one that cannot be read, stays unchanged.

    If the body is cut off, or has a byte order mark or values such as NaN that JSON lacks, a text
    search finds the name; a decoder then checks that the renamed body names the new model.
    """
    if endpoint.takes_audio:
        span = model_in_form(body)
        return body if span is None else _spliced(body, span, name.encode())
    written = to_json(name)
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        for found in islice(_NAMED.finditer(body), _TRIES):
            renamed = _spliced(body, found.span(1), written)
            with suppress(BadRequest):
                if decode(readable(renamed), partial=True).get("model") == name:
                    return renamed
        return body
    if "model" not in fields:
        return body
    fields["model"] = msgspec.Raw(written)
    return msgspec.json.encode(fields)


def with_priority(body: bytes, priority: int) -> bytes:
    """Set vLLM's ``priority`` (lower numbers go first) in ``body``, a complete JSON object.

    The field is appended. Of several fields with one name, decoders take the last, so a client's
    own priority has no effect.
    """
    end = body.rfind(b"}")
    before, after = body[:end], body[end:]
    comma = b"" if before.rstrip().endswith(b"{") else b","
    return b'%b%b"priority":%d%b' % (before, comma, priority, after)


def _spliced(body: bytes, span: tuple[int, int], value: bytes) -> bytes:
    first, last = span
    return body[:first] + value + body[last:]
