"""Request body, from bytes to a JSON object."""

import re

from pydantic_core import from_json

from extproc.request.errors import BadRequest

_BOM = b"\xef\xbb\xbf"

LARGE = 1_000_000
"""Bytes up to which a body is decoded whole, whatever is in it."""

MAX_VALUES = 500_000
"""Arrays, objects and strings in a larger body that is decoded whole. 13 million empty arrays fit
into 40 MB and take Python five seconds, in which a router decides nothing else."""

_BASE64_TAIL = re.compile(rb"[A-Za-z0-9+/_-]{256}\Z")


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
    """What of ``body`` is decoded: all of it, unless that would stall the router."""
    if len(body) <= LARGE:
        return body
    values = body.count(b"[") + body.count(b"{") + body.count(b'"') // 2
    return body[:LARGE] if values > MAX_VALUES else body


def ends_in_base64(body: bytes) -> bool:
    """Whether a truncated body broke off inside an image or other media, and not inside text."""
    return _BASE64_TAIL.search(body, max(0, len(body) - 256)) is not None
