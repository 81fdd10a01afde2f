"""Request body, from bytes to a JSON object."""

import re

from pydantic_core import from_json

from extproc.request.errors import BadRequest

_BOM = b"\xef\xbb\xbf"

LARGE = 1_000_000
"""Bytes up to which a body is decoded whole, whatever is in it."""

MAX_VALUES = 500_000
"""Values in a larger body that is decoded whole. 13 million empty arrays fit into 40 MB and take
Python five seconds, in which a router decides nothing else; 20 million token ids take 0.7 s."""

_TAIL = 4_096
"""Bytes at the end of a truncated body that tell what follows."""

_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{256}\Z")
_TOKEN_IDS = re.compile(rb"[\d,\s\[\]]{256,}\Z")


def decode(body: bytes, partial: bool = False) -> dict[str, object]:
    """The JSON object in ``body``; with ``partial``, as much of one as is there.

    Raises:
        BadRequest: it is not a JSON object in UTF-8, or nests deeper than 200 levels.
    """
    body = body.removeprefix(_BOM)
    if not body:
        if partial:
            return {}
        raise BadRequest("the request body is empty; send a JSON object", code="invalid_json")
    try:
        value = from_json(body, allow_partial="trailing-strings" if partial else False)
    except (ValueError, RecursionError, MemoryError) as error:
        message = f"the request body is not valid JSON: {error}"
        raise BadRequest(message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("the request body is not a JSON object", code="invalid_type")
    return value


def readable(body: bytes) -> bytes:
    """What of ``body`` is decoded: all of it, unless that could stall the router.

    A value follows a comma or is the first one in its array or object, so there are at most as
    many as commas and opening brackets. Those inside strings are counted, too: a text with more
    than ``MAX_VALUES`` commas is read in part.
    """
    if len(body) <= LARGE:
        return body
    values = body.count(b",") + body.count(b"[") + body.count(b"{")
    return body[:LARGE] if values > MAX_VALUES else body


def tokens_per_byte(part: bytes, of_text: float) -> float:
    """Prompt tokens in a byte of what follows ``part``, the beginning of a body.

    Args:
        part: it may break off inside an image or other media (no tokens follow), token ids (more
            like its last ones follow) or text.
        of_text: tokens in a byte of text.
    """
    tail = part[-_TAIL:]
    if _BASE64.search(tail):
        return 0.0
    if ids := _TOKEN_IDS.search(tail):
        return ids[0].count(b",") / len(ids[0])
    return of_text
