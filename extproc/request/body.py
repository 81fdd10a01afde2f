"""Decodes the body of a request to a JSON object, within a budget of time."""

import re
from contextlib import suppress
from itertools import islice
from string import ascii_letters

import numpy as np
from pydantic_core import from_json

from extproc.request.errors import BadRequest

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # with which UTF-8 may begin
_BUDGET = 40e6  # nanoseconds to read a body: the router decides nothing else meanwhile
_PER_BYTE = 4.5  # nanoseconds for each byte; 11 in numbers with thousands of digits
_COSTS = {ord(","): 130.0, ord('"'): 75.0, ord("["): 350.0, ord("{"): 900.0}
"""Byte → nanoseconds beyond ``_PER_BYTE`` to decode and visit a value (pydantic-core 2.50, Python
3.11). A value or key follows each comma; a string has two quotes. Bytes inside strings count
as well. A thread would not help, because the decoder keeps the GIL."""
_STRIDE = 131_072  # bytes in a step of the estimate; at least one step is read, in 40 ms at worst

_TAIL = 4_096  # bytes at the end of a truncated body, from which tokens of the rest are estimated

_END = 16_384  # bytes at the end of a long body, where fields may follow the prompt
_NAMES = re.compile(
    rb'"(?:model|n|stream|previous_response_id|max_(?:completion_|output_)?tokens)"\s*:'
)
_TRIES = 4

_BASE64 = ascii_letters.encode() + b"0123456789+/_-"
_TOKEN_IDS = b"0123456789,[] \t\r\n"
_RUN = 256  # bytes of one kind at the end of a part: the rest of the body is of this kind, too


def decode(body: bytes, partial: bool = False) -> dict[str, object]:
    """Decode the JSON object in ``body``; with ``partial``, the beginning of an object.

    Raises:
        BadRequest: the body is not a JSON object in UTF-8, or nests deeper than 200 levels.
    """
    body = body.removeprefix(_BYTE_ORDER_MARK)
    if not body:
        if partial:
            return {}
        raise BadRequest("the request body is empty; send a JSON object", code="invalid_json")
    try:
        value = from_json(body, allow_partial="trailing-strings" if partial else False)
    except (ValueError, RecursionError, MemoryError) as error:
        raise BadRequest(
            f"the request body is not valid JSON: {error}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise BadRequest("the request body is not a JSON object", code="invalid_type")
    return value


def readable(body: bytes) -> bytes:
    """Return the beginning of ``body`` that can be decoded within ``_BUDGET``.

    Ordinary bodies fit as a whole: 8 MB of text or images, 200,000 token ids, 10,000 messages.
    """
    left = _BUDGET
    for start in range(0, len(body) if len(body) > _STRIDE else 0, _STRIDE):
        part = np.frombuffer(body[start : start + _STRIDE], np.uint8)  # faster than bytes.count
        marks = sum(np.count_nonzero(part == mark) * cost for mark, cost in _COSTS.items())
        left -= len(part) * _PER_BYTE + marks
        if left < 0.0:
            return body[: max(start, _STRIDE)]
    return body


def ending(body: bytes) -> dict[str, object]:
    """Return the fields at the end of a body that is too long to be decoded as a whole.

    Clients may put the model and the bound of the output behind the prompt. ``_NAMES`` finds such a
    field. With an opening brace before it, the rest of the body is a JSON object if the field is at
    the top level. If the field is nested, decoding fails, and the next match is tried.
    """
    end = body[-_END:]
    for name in islice(_NAMES.finditer(end), _TRIES):
        with suppress(BadRequest):
            return decode(b"{" + end[name.start() :])
    return {}


def tokens_per_byte(part: bytes, of_text: float) -> float:
    """Estimate the prompt tokens per byte in the rest of a body that begins with ``part``.

    If the part ends inside an image or other media, the rest has no tokens. If it ends inside a
    list of token ids, the rest has as many ids per byte as the part's end. Otherwise the rest is
    text, with ``of_text`` tokens per byte.
    """
    tail = part[-_TAIL:]
    base64, ids = (tail[len(tail.rstrip(kind)) :] for kind in (_BASE64, _TOKEN_IDS))
    if len(base64) >= _RUN:
        return 0.0
    return ids.count(b",") / len(ids) if len(ids) >= _RUN else of_text
